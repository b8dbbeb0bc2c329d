// The page: state shared by the views, the header and the settings.
import { apiKey, getCosts, getState, setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { Lesson } from "./lesson.js";
import { Notice } from "./parts.js";
import { randomSeed } from "./run.js";
import { html, render, useCallback, useEffect, useRef, useState } from "./vendor/htm-preact.js";

const VIEWS = [
  ["chat", "Write", Chat],
  ["compare", "Compare", Compare],
  ["lesson", "Lesson", Lesson],
];
const TREES = [
  ["auto", "auto: by observed costs"],
  ["chain:3", "chain of 3"],
  ["chain:6", "chain of 6"],
  ["dynamic:12,4,3", "tree, 12 nodes"],
  ["dynamic:30,6,5", "tree, 30 nodes"],
  ["dynamic:59,8,10", "tree, 59 nodes (EAGLE-2’s)"],
];

const stored = (name, fallback) => {
  try {
    return localStorage.getItem(name) ?? fallback;
  } catch {
    return fallback;
  }
};
const store = (name, value) => {
  try {
    localStorage.setItem(name, value);
  } catch { /* forgotten when the page is closed */ }
};

function useTheme() {
  const [chosen, setChosen] = useState(stored("draftwing-theme", "system"));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const [system, setSystem] = useState(dark.matches);
  useEffect(() => {
    const listen = () => setSystem(dark.matches);
    dark.addEventListener("change", listen);
    return () => dark.removeEventListener("change", listen);
  }, []);
  const now = chosen === "system" ? (system ? "dark" : "light") : chosen;
  document.documentElement.style.colorScheme = now;
  document.documentElement.dataset.theme = now;
  const flip = () => {
    const next = now === "dark" ? "light" : "dark";
    store("draftwing-theme", next);
    setChosen(next);
  };
  return [now, flip];
}

// Keeps the typed text, since the page is redrawn while texts are generated.
function NumberField({ value, min, max, step = 1, onValue }) {
  const [text, setText] = useState(String(value));
  useEffect(() => {
    if (Number(text) !== value) setText(String(value));
  }, [value]);
  const read = (event) => {
    setText(event.target.value);
    const number = step === 1 ? Math.trunc(Number(event.target.value)) : Number(event.target.value);
    if (event.target.value !== "" && Number.isFinite(number)) onValue(Math.min(max, Math.max(min, number)));
  };
  return html`<input type="number" min=${min} max=${max} step=${step} value=${text} onInput=${read} onBlur=${() => setText(String(value))} />`;
}

function Settings({ state, options, onChange, onKey, needsKey }) {
  const set = (name, value) => onChange((now) => ({ ...now, [name]: value })); // two fields may change before the next redraw
  const isCustom = !TREES.some(([value]) => value === options.tree);
  return html`<form class="settings" onSubmit=${(event) => event.preventDefault()} aria-label="Settings">
    <label>Draft <select value=${options.draft} onChange=${(event) => set("draft", event.target.value)}>
      ${state.drafts.map((draft) => html`<option value=${draft.name}>${draft.name === "none" ? "none: no speculation" : draft.name}</option>`)}</select></label>
    <label>Tree <select value=${options.tree} disabled=${options.draft === "none"} onChange=${(event) => set("tree", event.target.value)}>
      ${TREES.map(([value, name]) => html`<option value=${value}>${name}</option>`)}${isCustom && html`<option value=${options.tree}>${options.tree}</option>`}</select></label>
    <label>Temperature <${NumberField} min=${0} max=${5} step=${0.1} value=${options.temperature} onValue=${(value) => set("temperature", value)} /></label>
    <label>Seed <span class="joined"><${NumberField} min=${0} max=${2 ** 53 - 1} value=${options.seed} onValue=${(value) => set("seed", value)} />
      <button type="button" class="button icon" aria-label="Another seed" title="Another seed" onClick=${() => set("seed", randomSeed())}>⚂</button></span></label>
    <label>Tokens <${NumberField} min=${1} max=${4096} value=${options.maxTokens} onValue=${(value) => set("maxTokens", value)} /></label>
    ${state.is_chat && html`<label class="wide">System message <input type="text" value=${options.system} placeholder="none" onInput=${(event) => set("system", event.target.value)} /></label>`}
    ${(state.needs_key || needsKey) && html`<label class="wide">API key <input type="password" autocomplete="off" value=${apiKey()} placeholder="kept for this tab only" onInput=${(event) => setApiKey(event.target.value)} onChange=${onKey} /></label>`}
  </form>`;
}

function Tabs({ view, onView }) {
  const list = useRef(null);
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = (VIEWS.findIndex(([name]) => name === view) + by + VIEWS.length) % VIEWS.length;
    onView(VIEWS[next][0]);
    list.current.children[next].focus();
  };
  return html`<div class="tabs" role="tablist" aria-label="Views" ref=${list} onKeyDown=${move}>
    ${VIEWS.map(([name, label]) => html`<button role="tab" id=${`tab-${name}`} aria-selected=${view === name} aria-controls="view" tabindex=${view === name ? 0 : -1} onClick=${() => onView(name)}>${label}</button>`)}
  </div>`;
}

const Mark = () => html`<svg class="mark" viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="8" /><path class="kept" d="M7 16h6l5-7h7" /><path class="bonus" d="M13 16h5l3 4h4" /><path class="lost" d="M13 16l4 9h3" /><circle cx="7" cy="16" r="2.6" /></svg>`;

function App() {
  const [theme, flip] = useTheme();
  const [state, setState] = useState(null), [error, setError] = useState(null), [costs, setCosts] = useState(null);
  const [view, setView] = useState(location.hash.slice(1) in { chat: 1, compare: 1, lesson: 1 } ? location.hash.slice(1) : "chat");
  const [options, setOptions] = useState({ draft: "none", tree: "auto", temperature: 0, seed: 1, maxTokens: 160, system: "" });
  const [run, setRun] = useState(null), [turns, setTurns] = useState([]), [, redraw] = useState(0);
  const frame = useRef(0);
  // Redraw once per frame: steps may arrive faster.
  const changed = useCallback(() => {
    frame.current ||= requestAnimationFrame(() => {
      frame.current = 0;
      redraw((count) => count + 1);
    });
  }, []);
  const load = async () => {
    setError(null);
    try {
      const served = await getState();
      setState(served);
      setOptions((now) => ({ ...now, draft: served.drafts.find((draft) => draft.is_default)?.name ?? "none", tree: served.tree ?? "auto" }));
    } catch (failure) {
      setError(failure);
    }
  };
  useEffect(() => void load(), []);
  const isOver = Boolean(run?.isOver); // more costs were observed during the run
  useEffect(() => {
    if (!state) return;
    getCosts().then(setCosts, (failure) => setCosts({ why: failure.message }));
  }, [state, isOver]);
  const go = (name) => {
    setView(name);
    history.replaceState(null, "", `#${name}`);
  };
  const View = VIEWS.find(([name]) => name === view)[2];
  const shared = { state, options, setOptions, costs, theme, run, setRun, turns, setTurns, changed, go };
  return html`
    <a class="skip" href="#view">Skip to the view</a>
    <header class="top">
      <div class="brand"><${Mark} /><div><h1>Draftwing</h1><p>${state ? html`${state.model}` : "inspector"}</p></div></div>
      ${state && html`<${Tabs} view=${view} onView=${go} />`}
      <button class="button icon theme" onClick=${flip} aria-label=${`Switch to ${theme === "dark" ? "light" : "dark"} colours`}>${theme === "dark" ? "☀" : "☾"}</button>
    </header>
    ${state && html`<details class="panel" open=${matchMedia("(min-width: 760px)").matches}><summary>Settings</summary>
      <${Settings} state=${state} options=${options} onChange=${setOptions} onKey=${load} /></details>`}
    <main id="view" role=${state ? "tabpanel" : null} aria-labelledby=${state ? `tab-${view}` : null} tabindex="-1">
      ${error && html`<div class="lone"><${Notice} error=${error} onRetry=${load} />
        ${error.kind === "key" && html`<label class="key-field">API key <input type="password" autocomplete="off" onChange=${(event) => { setApiKey(event.target.value); load(); }} /></label>`}</div>`}
      ${!error && !state && html`<p class="lone muted" role="status">Connecting to the server…</p>`}
      ${state && html`<${View} ...${shared} />`}
    </main>`;
}

document.getElementById("app").replaceChildren();
render(html`<${App} />`, document.getElementById("app"));
