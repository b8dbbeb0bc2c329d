// One text: its steps and their statistics.
import { write } from "./api.js";

export const PHASES = ["draft", "verify", "accept", "commit", "host"];
export const randomSeed = () => Math.floor(Math.random() * 1e9);

let serial = 0;

export class Run {
  constructor({ state, prompt, history = [], options, trace = true }) {
    Object.assign(this, { state, prompt, history, options, trace });
    this.id = ++serial;
    this.steps = [];
    this.text = "";
    this.status = "waiting"; // then "writing", and "done", "stopped" or "failed"
    this.error = null;
    this.finish = null;
    this.control = new AbortController();
  }

  get messages() {
    const { system } = this.options;
    const before = system ? [{ role: "system", content: system }] : [];
    return [...before, ...this.history, { role: "user", content: this.prompt }];
  }

  // Steps with a tree.
  get traced() {
    return this.steps.filter((step) => step.nodes);
  }

  get isOver() {
    return this.status === "done" || this.status === "stopped" || this.status === "failed";
  }

  async start(onChange) {
    const began = performance.now();
    this.began = began;
    try {
      this.finish = await write(
        {
          state: this.state, prompt: this.prompt, messages: this.messages, options: this.options, trace: this.trace,
          signal: this.control.signal,
        },
        (text, trace) => {
          this.status = "writing";
          // Use the server's clock: chunks may arrive late, and several at once.
          const at = trace?.at === undefined ? performance.now() - began : trace.at * 1000;
          const pieces = trace?.pieces ?? [{ text, drafted: null }];
          this.steps.push({ ...trace, pieces, text, at, index: this.steps.length });
          this.text += text;
          onChange();
        },
      );
      this.status = "done";
    } catch (error) {
      this.status = error.name === "AbortError" ? "stopped" : "failed";
      this.error = error.name === "AbortError" ? null : error;
    }
    onChange();
    return this;
  }

  stop() {
    this.control.abort();
  }
}

// Sums over the steps of a run.
export function figures(run) {
  const steps = run.traced;
  const sums = { tokens: 0, forwards: steps.length, drafted: 0, accepted: 0, alpha: [], seconds: {}, total: 0 };
  const reached = [], taken = [];
  for (const phase of PHASES) sums.seconds[phase] = 0;
  for (const step of steps) {
    sums.tokens += step.num_tokens;
    sums.drafted += step.num_drafted;
    sums.accepted += step.num_accepted;
    for (let depth = 0; depth < step.depth; depth++) {
      reached[depth] = (reached[depth] || 0) + (step.num_accepted >= depth);
      taken[depth] = (taken[depth] || 0) + (step.num_accepted > depth);
    }
    for (const phase of PHASES) sums.seconds[phase] += step.seconds[phase] / step.num_rows;
  }
  sums.total = PHASES.reduce((sum, phase) => sum + sums.seconds[phase], 0);
  sums.alpha = taken.map((count, depth) => ({ rate: reached[depth] ? count / reached[depth] : 0, of: reached[depth] }));
  sums.tau = sums.forwards ? sums.tokens / sums.forwards : 0;
  sums.speed = sums.total ? sums.tokens / sums.total : 0;
  return sums;
}

// Milliseconds of a step.
export const stepMs = (step) => PHASES.reduce((sum, phase) => sum + step.seconds[phase], 0) * 1000;

// A token as a short label, with its blanks made visible.
export function visible(text, most = 14) {
  const shown = text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍").replace(/ /g, "·");
  const letters = [...shown];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : shown || "∅";
}

// A token for screen readers.
export const spoken = (text) =>
  text.replace(/\n/g, " newline ").replace(/\t/g, " tab ").replace(/^ +$/, (all) => `${all.length} spaces`).trim() || "empty";

export const percent = (value) =>
  value === null || value === undefined ? "" : value > 0 && value < 0.005 ? "<1%" : value < 1 && value > 0.995 ? ">99%" : `${Math.round(100 * value)}%`;

export const short = (value) =>
  !Number.isFinite(value) ? "–" : value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
