// A conversation, and the steps of the selected answer next to it.
import { Facts, Legend, Notice, StepView, Text } from "./parts.js";
import { Plots } from "./plots.js";
import { Run } from "./run.js";
import { Tree } from "./tree.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";

export const EXAMPLES = {
  chat: ["Explain in three sentences why the sky is blue.", "Write a Python function that checks whether a number is prime.", "List the days of the week, then the months of the year."],
  text: ["def quicksort(", "class Stack:\n    def __init__(self):", "import os\n\ndef walk(path):"],
};

export function Composer({ state, busy, onSend, onStop, label, again }) {
  const [draft, setDraft] = useState("");
  const field = useRef(null);
  const send = (event) => {
    event?.preventDefault();
    if (!draft.trim() || busy) return;
    onSend(draft);
    setDraft("");
  };
  const key = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const what = state.is_chat ? "Message" : "Text to continue";
  return html`<form class="composer" onSubmit=${send}>
    <label class="hidden" for="prompt">${what}</label>
    <textarea id="prompt" ref=${field} rows="2" value=${draft} placeholder=${state.is_chat ? "Ask something. Enter sends it." : "A text to continue. Enter sends it."}
      onInput=${(event) => setDraft(event.target.value)} onKeyDown=${key}></textarea>
    <div class="row">${again && !busy && html`<button type="button" class="button" onClick=${again}>Write it again</button>`}
      ${busy ? html`<button type="button" class="button strong" onClick=${onStop}>Stop</button>` : html`<button class="button strong" disabled=${!draft.trim()}>${label ?? "Write"}</button>`}</div>
  </form>`;
}

export const Examples = ({ state, onPick }) => html`<ul class="examples">
  ${EXAMPLES[state.is_chat ? "chat" : "text"].map((text) => html`<li><button class="example" onClick=${() => onPick(text)}>${text}</button></li>`)}
</ul>`;

// Selects the step to show: the latest until one is chosen.
export function useStep(run) {
  const [chosen, setChosen] = useState({ run: null, step: null, node: 0 });
  const steps = run?.traced ?? [];
  const mine = chosen.run === run ? chosen : { step: null, node: 0 };
  const latest = steps[steps.length - 1];
  // The last step of a text is often cut: show the one with the most accepted drafts.
  const rest = run?.isOver ? [...steps].sort((a, b) => b.num_accepted - a.num_accepted)[0] : latest;
  const step = (mine.step !== null && steps.find((each) => each.index === mine.step)) || rest || null;
  return {
    step,
    node: Math.min(mine.node, (step?.nodes.length ?? 1) - 1),
    onChoose: (index) => setChosen({ run, step: index, node: 0 }),
    onNode: (node) => setChosen({ run, step: step.index, node }),
  };
}

export function Chat({ state, options, costs, theme, run, setRun, turns, setTurns, changed }) {
  const view = useStep(run);
  const list = useRef(null);
  const busy = run && !run.isOver;
  const begin = (prompt, history, before) => {
    const next = new Run({ state, prompt, history, options: { ...options } });
    setTurns([...before, next]);
    setRun(next);
    next.start(changed);
  };
  const history = (upto) => upto.flatMap((each) => (each.text ? [{ role: "user", content: each.prompt }, { role: "assistant", content: each.text }] : []));
  const send = (prompt) => begin(prompt, state.is_chat ? history(turns) : [], turns);
  const again = () => {
    const before = turns.slice(0, -1);
    begin(turns[turns.length - 1].prompt, history(before), before);
  };
  // Keep the newest text visible, unless the user has scrolled up.
  useEffect(() => {
    const box = list.current;
    if (busy && box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
  });
  return html`<div class="split">
    <section class="card talk" aria-label="Conversation">
      <div class="turns" ref=${list} tabindex="0" role="region" aria-label="Texts">
        ${!turns.length && html`<div class="hello">
          <h2>See drafts being accepted</h2>
          <p>A small draft model guesses the next tokens; <b>${state.target}</b> checks all guesses in one forward and keeps those that match its own output. Write something and watch.</p>
          <${Examples} state=${state} onPick=${send} />
        </div>`}
        ${turns.map((each) => html`<article class=${`turn ${each === run ? "current" : ""}`}>
          <p class="asked"><span class="hidden">${state.is_chat ? "You:" : "Prompt:"} </span>${each.prompt}</p>
          <div class="answer" aria-busy=${!each.isOver}>
            <${Text} run=${each} chosen=${each === run ? view.step?.index : null} onChoose=${(index) => { setRun(each); if (each === run) view.onChoose(index); }} />
            ${each.error && html`<${Notice} error=${each.error} onRetry=${each === turns[turns.length - 1] && again} />`}
          </div>
          ${each.isOver && html`<div class="under"><${Facts} run=${each} />
            <p class="how">${each.options.draft === "none" ? "no drafts" : `${each.options.draft}, ${each.options.tree}`}; temperature ${each.options.temperature}, seed ${each.options.seed}${each.finish === "length" ? "; reached the token limit" : ""}${each.status === "stopped" ? "; stopped" : ""}</p>
            ${each !== run && html`<button class="button small" onClick=${() => setRun(each)}>Inspect</button>`}</div>`}
        </article>`)}
      </div>
      <p class="hidden" role="status">${busy ? "Writing" : run?.status === "done" ? `The answer is finished: ${run.text}` : ""}</p>
      <${Composer} state=${state} busy=${busy} onSend=${send} onStop=${() => run.stop()} again=${turns.length > 0 && again} />
    </section>
    <div class="stack"><section class="card look" aria-label="Inspector">
      <div class="head"><h2>${view.step ? "One step" : "An example step"}</h2><${Legend} /></div>
      ${view.step ? html`<${StepView} run=${run} ...${view} />` : html`<${Sample} />`}
    </section>
    ${view.step && html`<section class="card" aria-label="Statistics of this text"><h2 class="hidden">Statistics of this text</h2><${Plots} run=${run} step=${view.step} costs=${costs} theme=${theme} /></section>`}</div>
  </div>`;
}

// An example for a page without a text.
const sample = (text, parent, chance, kept) => ({ id: 0, text, parent, depth: 0, chance, kept });
const SAMPLE = {
  nodes: [sample(" the", -1, null, true), sample(" quick", 0, 0.71, true), sample(" lazy", 0, 0.14, false), sample(" brown", 1, 0.86, true), sample(" red", 1, 0.06, false), sample(" fox", 3, 0.93, true), sample(" bear", 3, 0.03, false), sample(" dog", 2, 0.8, false), sample(" ran", 5, 0.4, false)],
  path: [0, 1, 3, 5], bonus: { text: " jumps" }, num_drafted: 8, num_accepted: 3, num_tokens: 4,
};

const Sample = () => html`<figure class="sample">
  <${Tree} step=${SAMPLE} chosen=${-2} onChoose=${() => {}} />
  <figcaption>An invented example. After “the”, 8 tokens were drafted, each shown with the drafter’s probability. The target accepted three of them in a row and added “jumps”: four tokens from one forward.</figcaption>
</figure>`;


