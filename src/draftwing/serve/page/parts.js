// Parts of several views: coloured text, a step, notices, bars of probabilities.
import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { figures, percent, short, spoken, stepMs, visible } from "./run.js";
import { Tree, TreeTable } from "./tree.js";

const KIND = (drafted) => (drafted === null ? "" : drafted ? "accepted" : "bonus");

// The text of a run by step. A click selects a step; the arrow keys do the same.
export function Text({ run, chosen, onChoose, until = Infinity }) {
  return html`<div class=${`text ${run.options.draft === "none" ? "plain" : ""}`}>${run.steps.map((step) => step.at <= until && html`<span
      class=${`step ${step.index === chosen ? "chosen" : ""}`} data-step=${step.index}
      onClick=${step.nodes && onChoose && (() => onChoose(step.index))}>${step.pieces.map((piece) => html`<span class=${KIND(piece.drafted)}>${piece.text}</span>`)}</span>`)}${!run.isOver && html`<span class="caret" aria-hidden="true"></span>`}</div>`;
}

export const Legend = () => html`<p class="legend">
  <span class="key"><i class="swatch accepted"></i>drafted and accepted</span>
  <span class="key"><i class="swatch bonus"></i>added by the target</span>
  <span class="key"><i class="swatch rejected"></i>rejected</span>
</p>`;

// An error and how to continue.
export function Notice({ error, onRetry }) {
  const [left, setLeft] = useState(error.retryAfter || 0);
  useEffect(() => {
    if (left <= 0) return undefined;
    const timer = setTimeout(() => setLeft(left - 1), 1000);
    return () => clearTimeout(timer);
  }, [left]);
  const title = { gone: "No connection", key: "API key needed", busy: "Busy", refused: "Refused", failed: "It failed" }[error.kind] ?? "It failed";
  return html`<div class=${`notice ${error.kind ?? ""}`} role="alert">
    <div><strong>${title}.</strong> ${error.message}</div>
    ${onRetry && html`<button class="button" onClick=${onRetry} disabled=${left > 0}>${left > 0 ? `Try again in ${left} s` : "Try again"}</button>`}
  </div>`;
}

export function Facts({ run }) {
  const sum = figures(run);
  if (!sum.forwards) return null;
  return html`<dl class="facts">
    <div><dt>tokens</dt><dd>${sum.tokens}</dd></div>
    <div><dt>tokens/s</dt><dd>${short(sum.speed)}</dd></div>
    <div><dt>tau</dt><dd>${sum.tau.toFixed(2)}</dd></div>
    <div><dt>accepted</dt><dd>${sum.drafted ? percent(sum.accepted / sum.drafted) : "–"}</dd></div>
  </dl>`;
}

// Moves through the steps of a run: buttons, a slider, and arrow keys outside of fields.
export function Stepper({ run, step, onChoose }) {
  const steps = run.traced, at = steps.indexOf(step);
  const go = (by) => {
    const next = steps[Math.min(steps.length - 1, Math.max(0, at + by))];
    if (next) onChoose(next.index);
  };
  useEffect(() => {
    const listen = (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.target.closest?.("input, textarea, select, [role=tab], .tree, .scroll")) return;
      if (event.key === "ArrowLeft") go(-1);
      else if (event.key === "ArrowRight") go(1);
      else if (event.key === "Home") go(-steps.length);
      else if (event.key === "End") go(steps.length);
      else return;
      event.preventDefault();
    };
    document.addEventListener("keydown", listen);
    return () => document.removeEventListener("keydown", listen);
  });
  return html`<div class="stepper">
    <button class="button icon" onClick=${() => go(-1)} disabled=${at <= 0} aria-label="Step before">←</button>
    <input type="range" min="1" max=${steps.length} value=${at + 1} aria-label="Step" onInput=${(event) => onChoose(steps[event.target.value - 1].index)} />
    <button class="button icon" onClick=${() => go(1)} disabled=${at >= steps.length - 1} aria-label="Step after">→</button>
    <output aria-live="polite">step ${at + 1} of ${steps.length}</output>
  </div>`;
}

// Bars of probabilities. `marks` labels tokens: {id: {kind: "drawn" | "drafted", say: text}}.
export function Bars({ rows, columns, caption, marks = {} }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table class="bars">
    <caption>${caption}</caption>
    <thead><tr><th scope="col">token</th>${columns.map((column) => html`<th scope="col" class=${column.bar ? "" : "num"}>${column.name}</th>`)}<th scope="col"><span class="hidden">fate</span></th></tr></thead>
    <tbody>${rows.map((row) => html`<tr class=${marks[row.id]?.kind ?? ""}>
      <th scope="row" class="mono" title=${spoken(row.text)}>${visible(row.text, 18)}</th>
      ${columns.map((column) => {
        const value = column.of(row);
        if (!column.bar) return html`<td class="num">${value === null ? "–" : column.write ? column.write(value) : short(value)}</td>`;
        return html`<td class="cell"><div><svg class=${`bar ${column.bar}`} height="12" aria-hidden="true"><rect width=${`${Math.min(100, 100 * (value ?? 0))}%`} height="12" rx="3" /></svg><span>${value === null ? "–" : percent(value)}</span></div></td>`;
      })}
      <td class="fate">${marks[row.id]?.say ?? ""}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

export function Distribution({ node, step, temperature }) {
  const drafted = new Set(step.nodes.filter((each) => each.parent === step.nodes.indexOf(node)).map((each) => each.id));
  const marks = {};
  for (const id of drafted) marks[id] = { kind: "drafted", say: "drafted" };
  const { drawn } = node.distribution;
  marks[drawn] = drafted.has(drawn) ? { kind: "drawn both", say: "drawn, and drafted: kept" } : { kind: "drawn", say: "drawn, not drafted" };
  const columns = [{ name: "p", bar: "p", of: (row) => row.p }];
  if (temperature > 0) {
    columns.push(
      { name: "log p", of: (row) => Math.log(row.p), write: (value) => value.toFixed(2) },
      { name: "noise g", of: (row) => row.g, write: (value) => value.toFixed(2) },
      { name: "sum", of: (row) => Math.log(row.p) + row.g, write: (value) => value.toFixed(2) },
    );
  }
  const rows = temperature > 0 ? [...node.distribution.top].sort((a, b) => Math.log(b.p) + b.g - Math.log(a.p) - a.g) : node.distribution.top;
  return html`<${Bars} rows=${rows} columns=${columns} marks=${marks} caption=${`The target’s distribution after “${spoken(node.text)}”`} />`;
}

// One step, in full.
export function StepView({ run, step, onChoose, node, onNode }) {
  const chosen = step.nodes[node] ?? step.nodes[0];
  const plus = step.num_tokens - Math.min(step.num_accepted, step.num_tokens);
  return html`
    <${Stepper} run=${run} step=${step} onChoose=${onChoose} />
    <p class="say">Drafted <b>${step.num_drafted}</b>, kept <b class="c-accepted">${step.num_accepted}</b>, and the target added <b class="c-bonus">${plus}</b>:
      ${" "}<b>${step.num_tokens}</b> ${step.num_tokens === 1 ? "token" : "tokens"} from one forward, in <b>${short(stepMs(step))} ms</b>${step.num_rows > 1 ? ` shared by ${step.num_rows} requests` : ""}.</p>
    <${Tree} step=${step} chosen=${node} onChoose=${onNode} />
    ${chosen.distribution && html`<${Distribution} node=${chosen} step=${step} temperature=${run.options.temperature} />`}
    <details class="more"><summary>The tree as a table</summary><${TreeTable} step=${step} onChoose=${onNode} /></details>`;
}
