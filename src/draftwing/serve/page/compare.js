// The same prompt and seed without and with drafts, on one clock. The texts must be equal.
import { Composer, Examples } from "./chat.js";
import { Facts, Legend, Notice, Text } from "./parts.js";
import { Race } from "./plots.js";
import { Run, figures, short } from "./run.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";

const span = (run) => (run.steps.length ? run.steps[run.steps.length - 1].at - run.steps[0].at : 0);
const first = (run) => run.steps[0]?.at ?? 0;

// Compares the texts character by character.
export function verdict([plain, fast]) {
  if (plain.status !== "done" || fast.status !== "done") return null;
  if (plain.text === fast.text) return { same: true, length: [...plain.text].length };
  let at = 0;
  while (plain.text[at] === fast.text[at]) at += 1;
  return { same: false, at };
}

function Lane({ run, name, note, clock }) {
  const { steps } = run;
  const done = clock >= span(run), until = first(run) + clock;
  const shown = steps.filter((step) => step.at <= until);
  const tokens = shown.reduce((sum, step) => sum + (step.num_tokens ?? 1), 0);
  const all = steps.reduce((sum, step) => sum + (step.num_tokens ?? 1), 0);
  return html`<section class="card lane" aria-label=${name}>
    <div class="head"><h2>${name}</h2><p class="muted">${note}</p></div>
    <div class="meter"><progress max=${Math.max(all, 1)} value=${tokens} aria-label=${`${name}: tokens`}></progress>
      <span class="time">${run.status === "waiting" ? "waiting" : `${(Math.min(clock, span(run)) / 1000).toFixed(3)} s`}${run.isOver && done && steps.length ? " ✓" : ""}</span></div>
    <${Text} run=${run} until=${until} />
    ${run.error && html`<${Notice} error=${run.error} />`}
    ${run.isOver && html`<${Facts} run=${run} />`}
  </section>`;
}

export function Compare({ state, options, theme, changed }) {
  const [lanes, setLanes] = useState(null), [clock, setClock] = useState(Infinity);
  const frame = useRef(0), control = useRef(null);
  const busy = lanes && !lanes.every((run) => run.isOver);
  useEffect(() => () => {
    cancelAnimationFrame(frame.current);
    control.current?.abort();
  }, []);
  const replay = (runs) => {
    cancelAnimationFrame(frame.current);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return setClock(Infinity);
    const began = performance.now(), end = Math.max(...runs.map(span));
    const tick = () => {
      const now = performance.now() - began;
      setClock(now >= end ? Infinity : now);
      if (now < end) frame.current = requestAnimationFrame(tick);
    };
    return tick();
  };
  const start = async (prompt) => {
    control.current?.abort();
    const stop = (control.current = new AbortController());
    const drafting = options.draft === "none" ? state.drafts.find((draft) => draft.name !== "none") : null;
    const fast = { ...options, draft: drafting?.name ?? options.draft };
    const runs = [{ ...options, draft: "none" }, fast].map((each) => new Run({ state, prompt, options: each }));
    for (const run of runs) stop.signal.addEventListener("abort", () => run.stop());
    cancelAnimationFrame(frame.current);
    setClock(Infinity);
    setLanes(runs);
    // One after the other: at the same time, they would slow each other down.
    for (const run of runs) {
      if (stop.signal.aborted) Object.assign(run, { status: "stopped" });
      else await run.start(changed);
      if (run.status !== "done") stop.abort();
    }
    changed();
    if (runs.every((run) => run.status === "done")) replay(runs);
  };
  const result = lanes && verdict(lanes);
  const speeds = lanes?.map((run) => figures(run).speed);
  return html`<div class="compare">
    <section class="card ask" aria-label="Prompt">
      <h2>The same seed, twice</h2>
      <p>The text is generated without drafts, then with drafts, one after the other so that they do not slow each other down. Then both are replayed on one clock, which starts at the first token of each.</p>
      ${!lanes && html`<${Examples} state=${state} onPick=${start} />`}
      ${lanes && html`<p class="asked">${lanes[0].prompt}</p>`}
      <${Composer} state=${state} busy=${busy} onSend=${start} onStop=${() => control.current.abort()} label="Compare" again=${lanes && (() => start(lanes[0].prompt))} />
    </section>
    ${lanes && html`<div class=${`verdict ${result ? (result.same ? "same" : "other") : ""}`} role="status">
      ${result ? result.same
        ? html`<strong>identical</strong><span>All ${result.length.toLocaleString("en")} characters are the same.</span>`
        : html`<strong>different</strong><span>The texts part at character ${result.at + 1}. Speculation must not change a text: please report this, with the prompt and the settings.</span>`
        : html`<span>${busy ? `Writing the ${lanes[0].isOver ? "speculative" : "baseline"} text…` : "Nothing to compare: a text was not finished."}</span>`}
      ${result && html`<b class="ratio">${short(speeds[1] / speeds[0])}× <small>tokens/s</small></b><button class="button" onClick=${() => replay(lanes)}>Play again</button>`}
    </div>
    <${Legend} />
    <div class="lanes">
      <${Lane} run=${lanes[0]} name="Plain" note="one token per forward" clock=${clock} />
      <${Lane} run=${lanes[1]} name="Speculative" note=${`${lanes[1].options.draft}, ${lanes[1].options.tree}`} clock=${clock} />
    </div>
    ${lanes.every((run) => run.steps.length) && html`<section class="card" aria-label="Race"><${Race} lanes=${lanes} until=${clock / 1000} theme=${theme} /></section>`}`}
  </div>`;
}
