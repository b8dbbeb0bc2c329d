// How a step works, with the numbers of one step: draft, verify, accept, and the classic rules for comparison.
import { getLesson } from "./api.js";
import { Composer, EXAMPLES, useStep } from "./chat.js";
import { Bars, Distribution, Legend, Notice, Stepper, Text } from "./parts.js";
import { Run, percent, short, spoken, visible } from "./run.js";
import { Tree } from "./tree.js";
import { html, useEffect, useState } from "./vendor/htm-preact.js";

const MOST = 64;
const T = ({ children }) => html`<code class="token">${visible(children)}</code>`;

function Part({ number, title, children }) {
  return html`<section class="card part" aria-labelledby=${`part-${number}`}>
    <h2 id=${`part-${number}`}><span class="number" aria-hidden="true">${number}</span>${title}</h2>${children}</section>`;
}

function DraftPart({ run, step, state, node, onNode }) {
  const draft = state.drafts.find((each) => each.name === run.options.draft);
  const ms = short(step.seconds.draft * 1000);
  return html`<${Part} number="1" title="Draft: guess ahead">
    <p>The last token of the text so far is <${T}>${step.nodes[0].text}<//>. It is <em>pending</em>: emitted, but not yet read by the target. In ${ms} ms the drafter <b>${run.options.draft}</b>
      ${step.num_drafted ? ` guessed ${step.num_drafted} tokens that may follow, as a tree: each node is one guess for what comes after the node before it.` : ` guessed nothing here: by the observed costs, guesses would have cost more than they save. Choose another step.`}</p>
    <${Tree} step=${step} chosen=${node} onChoose=${onNode} />
    <p class="note">${chanceMeans(run, draft)}</p>
    <${Features} draft=${draft} state=${state} />
  <//>`;
}

function chanceMeans(run, draft) {
  if (!draft?.has_net) return "The percentages are the drafter’s estimates that a token follows its parent. It copies from earlier text and estimates from the length of the match.";
  if (run.options.temperature > 0) return "At this temperature the target adds noise when it draws (part 3), and the drafter uses the same noise. The percentages are the probabilities that the target draws the guess with this noise: they are not q.";
  return "The percentages are q, the draft’s probability of a token given the node before it.";
}

// The layers of the target that a head reads.
function Features({ draft, state }) {
  if (!draft?.taps?.length) return null;
  const layers = state.num_layers, wide = 560 / (layers + 1);
  const x = (tap) => 20 + tap * wide;
  return html`<details class="more" open><summary>What this head reads: EAGLE’s features</summary>
    <p>The target’s hidden states predict its next tokens far better than the last token alone, and each forward computes them anyway. This head reads
      ${draft.taps.length === 1 ? ` the one after layer ${draft.taps[0]} of ${layers}` : ` those after layers ${draft.taps.slice(0, -1).join(", ")} and ${draft.taps[draft.taps.length - 1]} of ${layers}, concatenated`}: its <em>features</em>.
      With the embedding of the next token they go through a single decoder layer, whose output approximates the feature of a token that the target has not read yet. From it the head continues with its own guess, level by level.</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Layers that the head reads">
    <svg class="taps" width="600" height="104" viewBox="0 0 600 104" role="img" aria-label=${`The target’s ${layers} layers; the head reads after ${draft.taps.join(", ")}`}>
      ${Array.from({ length: layers }, (_, i) => html`<rect class="layer" x=${x(i) + 3} y="8" width=${wide - 6} height="30" rx="4" />`)}
      ${draft.taps.map((tap) => html`<g><path class="wire" d=${`M${x(tap)},23V58H300V72`} /><circle class="tap" cx=${x(tap)} cy="23" r="5" /></g>`)}
      <rect class="head" x="225" y="72" width="150" height="28" rx="6" /><text x="300" y="90" text-anchor="middle">draft head: 1 layer</text>
    </svg></div></details>`;
}

function VerifyPart({ step, costs, run, node, onNode }) {
  const plain = costs?.verify?.[0]?.[1], took = step.seconds.verify + step.seconds.accept + step.seconds.commit;
  const chosen = step.nodes[node] ?? step.nodes[0];
  return html`<${Part} number="2" title="Verify: one forward, all guesses">
    <p>The target reads the pending token and all ${step.num_drafted} guesses in a single forward, each seeing only the nodes above it. That took ${short(took * 1000)} ms${" "}
      ${plain ? `(one token alone: about ${short(plain * 1000)} ms here, since both mostly wait for the same weights from memory)` : ""}.
      The result is a distribution <i>p</i> of the next token at <em>every</em> node, as if the text ended there.</p>
    <div class="pick" role="group" aria-label="Node">${step.nodes.map((each, i) => html`<button class=${`chip ${each.kept ? "kept" : ""}`} aria-pressed=${i === node} onClick=${() => onNode(i)}>${visible(each.text)}</button>`)}</div>
    <${Distribution} node=${chosen} step=${step} temperature=${0} />
    <p class="note">The bars show the likeliest tokens, the drafted ones, and the one that is drawn${run.options.temperature > 0 ? `, at temperature ${run.options.temperature}` : ". At temperature 0 the likeliest token is taken; p is shown as it is at temperature 1"}.</p>
  <//>`;
}

function AcceptPart({ step, run, onHeat }) {
  const [at, setAt] = useState(0);
  useEffect(() => setAt(0), [step]);
  const place = Math.min(at, step.path.length - 1), node = step.nodes[step.path[place]];
  const drawn = node.distribution.top.find((each) => each.id === node.distribution.drawn);
  const isLast = place === step.path.length - 1, hot = run.options.temperature > 0;
  return html`<${Part} number="3" title="Accept: follow what the target draws">
    <p>${hot
      ? html`To draw from <i>p</i>, add a number <i>g</i> to each token’s log p and take the greatest sum. If the numbers are Gumbel noise, that is exactly a draw from p. Here the noise is not random: it is a hash of (seed ${run.options.seed}, position in the text, token), so target and drafter compute the same noise.`
      : html`At temperature 0 nothing is random: the target’s token is the one with the greatest <i>p</i>.`}
      ${" "}Start at the root, draw the target’s token there, and go down if a guess has that token. If none has it, the drawn token itself is emitted: the <span class="c-bonus">bonus</span>. Every step emits at least this one.</p>
    <div class="pick" role="group" aria-label="Place on the path">${step.path.map((index, i) => html`<button class="chip kept" aria-pressed=${i === place} onClick=${() => setAt(i)}>${i + 1}. after ${visible(step.nodes[index].text)}</button>`)}</div>
    <${Distribution} node=${node} step=${step} temperature=${run.options.temperature} />
    <p class="say">${hot ? `log p + g is greatest for` : `p is greatest for`} <${T}>${drawn?.text ?? ""}<//>: ${isLast
      ? html`no guess after <${T}>${node.text}<//> has it, so it is the bonus, and the step ends.`
      : html`a guess has it, so it is <span class="c-accepted">kept</span>, and the walk continues there.`}</p>
    ${!hot && html`<p><button class="button" onClick=${onHeat}>See it with noise, at temperature 0.8</button></p>`}
    <h3>Why the text cannot change</h3>
    <p>Each emitted token is the ${hot ? "argmax of log p + g" : "argmax of p"} at its position, and ${hot ? "neither p nor g depends" : "p does not depend"} on the drafts. A better drafter only emits more of them per step. The same model, prompt and seed give the same text with any drafter and any tree. <b>Compare</b> tests this.</p>
  <//>`;
}

const numbers = [
  { name: "p", bar: "p", of: (row) => row.p },
  { name: "q", bar: "q", of: (row) => row.q },
];

function Try({ each, number, withNode, root, all }) {
  const above = each.parent === 0 ? root.text : (all.find((other) => other.node === each.parent)?.text ?? "");
  return html`<li class=${each.kept ? "kept" : "rejected"}>
    <p><b>${number}.</b> ${withNode ? html`After <${T}>${above}<//>: ` : ""}<${T}>${each.text}<//> was drawn from q. p ${percent(each.p) || "0%"}, q ${percent(each.q)}:
      ${" "}keep with probability min(1, p/q) = <b>${each.accept.toFixed(3)}</b>. The draw is u = ${each.u.toFixed(3)}, ${each.kept ? html`below it: <b class="c-accepted">kept</b>.` : html`not below it: <b>rejected</b>.`}</p>
    <details class="more"><summary>p and q there</summary><${Bars} rows=${each.distributions} columns=${numbers} marks=${{ [each.id]: { kind: "drafted", say: "drafted" } }} caption=${`p and q where “${spoken(each.text)}” was tried`} /></details></li>`;
}

function Tries({ told, withNode }) {
  const { last } = told;
  return html`<ol class="tries">${told.tries.map((each, i) => html`<${Try} each=${each} number=${i + 1} withNode=${withNode} root=${told.root} all=${told.tries} />`)}</ol>
    <p class="say">${told.tries.length === 0 ? "Nothing was drafted here. " : ""}${last.is_rest
      ? html`The token after the last kept one is drawn from the residual, max(0, p − q) scaled to 1: <${T}>${last.text}<//>.`
      : html`Nothing was rejected after the last kept token, so the next one is drawn from p itself: <${T}>${last.text}<//>.`}</p>
    <details class="more"><summary>The distribution that it was drawn from</summary><${Bars} rows=${last.distributions} columns=${[numbers[0]]} marks=${{ [last.id]: { kind: "drawn", say: "drawn" } }} caption="The distribution of the token after the kept ones" /></details>`;
}

function RulesPart({ run, step, state }) {
  const [lesson, setLesson] = useState(null), [error, setError] = useState(null);
  const load = async () => {
    setError(null);
    setLesson(null);
    const before = run.steps.slice(0, step.index).flatMap((each) => each.token_ids ?? []);
    const text = state.is_chat ? { messages: run.messages } : { prompt: run.prompt };
    try {
      setLesson(await getLesson({ ...text, token_ids: before, draft: run.options.draft, temperature: run.options.temperature, seed: run.options.seed }));
    } catch (failure) {
      setError(failure);
    }
  };
  useEffect(() => {
    let isCurrent = true; // moving quickly through steps loads only the last one
    const timer = setTimeout(() => isCurrent && load(), 250);
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [run, step]);
  const waiting = !lesson && !error && html`<p class="muted" role="status">Decoding this step again by the classic rules…</p>`;
  const none = lesson?.why && html`<p class="empty">${lesson.why}</p>`;
  const failed = error && html`<${Notice} error=${error} onRetry=${load} />`;
  return html`
    <${Part} number="4" title="The classic rule: rejection sampling">
      <p>Most systems draw with a random generator, so the target’s token cannot be predicted. Guesses are drawn from <i>q</i> and kept with probability min(1, p/q); after a rejection the token is drawn from the residual of p. Together this is exactly p: rejections remove what q gives too much, and the residual adds what it gives too little. Below, Draftwing applied this rule at this position of the text, at temperature ${lesson?.temperature ?? run.options.temperature}.</p>
      ${waiting}${failed}${none}${lesson?.chain && html`<${Tries} told=${lesson.chain} />`}
      <p class="note">This keeps the <em>distribution</em> of the text, not the text: other drafts or random numbers give another, equally likely text. Leviathan et al. 2023, Chen et al. 2023.</p>
    <//>
    <${Part} number="5" title="With a tree: more than one try">
      <p>A tree has several guesses for one position. They are tried in turn: each rejection subtracts q from p and removes the tried token from q. The next guess is tested against both results.</p>
      ${waiting}${none}${lesson?.tree && html`<${Tries} told=${lesson.tree} withNode=${true} />`}
      <p class="note">Multi-round rejection without replacement: SpecInfer, Sequoia. With keyed noise (part 3) second and third guesses help more, since the same noise favours them.</p>
    <//>`;
}

export function Lesson({ state, options, costs, run, setRun, turns, setTurns, changed }) {
  const view = useStep(run?.steps.some((step) => step.nodes?.[0].distribution) || run?.trace === "full" ? run : null);
  const ready = run?.trace === "full", busy = ready && !run.isOver;
  const begin = (prompt, history, own, before) => {
    const next = new Run({ state, prompt, history, options: { ...own, maxTokens: Math.min(own.maxTokens, MOST) }, trace: "full" });
    setRun(next);
    setTurns([...before, next]);
    next.start(changed);
  };
  const fresh = (prompt) => begin(prompt, [], options, []);
  const again = run && !ready && (() => begin(run.prompt, run.history, run.options, turns.slice(0, turns.indexOf(run))));
  const { step, node, onNode } = view;
  return html`<div class="lesson">
    <section class="card ask" aria-label="Text of the lesson">
      <h2>How a step works</h2>
      <p>Five parts, with the numbers of one step. The server also sends the target’s distribution at every node, which makes these steps slower than others.</p>
      ${again && html`<p><button class="button strong" onClick=${again}>Use the last text</button></p>`}
      ${!run && html`<ul class="examples">${EXAMPLES[state.is_chat ? "chat" : "text"].map((text) => html`<li><button class="example" onClick=${() => fresh(text)}>${text}</button></li>`)}</ul>`}
      ${ready && html`<p class="asked">${run.prompt}</p><${Text} run=${run} chosen=${step?.index} onChoose=${view.onChoose} /><${Legend} />`}
      ${ready && run.error && html`<${Notice} error=${run.error} onRetry=${() => begin(run.prompt, run.history, run.options, turns.filter((each) => each !== run))} />`}
      <${Composer} state=${state} busy=${busy} onSend=${fresh} onStop=${() => run.stop()} />
    </section>
    ${ready && step?.nodes[0].distribution && html`
      <div class="card bar-card"><${Stepper} run=${run} step=${step} onChoose=${view.onChoose} /></div>
      <${DraftPart} run=${run} step=${step} state=${state} node=${node} onNode=${onNode} />
      <${VerifyPart} run=${run} step=${step} costs=${costs} node=${node} onNode=${onNode} />
      <${AcceptPart} run=${run} step=${step} onHeat=${() => begin(run.prompt, run.history, { ...run.options, temperature: 0.8 }, turns.filter((each) => each !== run))} />
      ${run.isOver && html`<${RulesPart} run=${run} step=${step} state=${state} />`}`}
  </div>`;
}
