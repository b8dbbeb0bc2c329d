// Live plots of a run, and the machine's cost curve, each with its figures as text.
import { html, useEffect, useRef } from "./vendor/htm-preact.js";
import { PHASES, figures, percent, short } from "./run.js";

const uPlot = window.uPlot;
const HEIGHT = 168;

// A colour of the style sheet, for the canvas.
function colour(name, alpha = 1) {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return alpha === 1 ? found : found.replace(/^rgb\(/, "rgba(").replace(/\)$/, `, ${alpha})`);
}

function axes(x, y) {
  const font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const common = { stroke: colour("muted"), font, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, labelFont: font };
  return [
    { ...common, label: x, labelSize: 16, size: 26, grid: { show: false } },
    { ...common, label: y, labelSize: 16, size: 42 },
  ];
}

export function Plot({ title, note, make, data, theme, tall = HEIGHT }) {
  const frame = useRef(null), plot = useRef(null);
  useEffect(() => {
    const width = () => Math.max(120, frame.current.clientWidth);
    const options = { width: width(), height: tall, legend: { show: false }, cursor: { y: false, points: { size: 6 } }, padding: [8, 10, 0, 0], ...make() };
    plot.current = new uPlot(options, data, frame.current);
    const watch = new ResizeObserver(() => plot.current.setSize({ width: width(), height: tall }));
    watch.observe(frame.current);
    return () => {
      watch.disconnect();
      plot.current.destroy();
    };
  }, [theme, make]);
  useEffect(() => plot.current.setData(data), [data]);
  return html`<figure class="plot">
    <figcaption><strong>${title}</strong> <span>${note}</span></figcaption>
    <div ref=${frame} class="canvas" aria-hidden="true"></div>
  </figure>`;
}

const from = (least, step = 1) => (u, low, high) => [Math.min(0, low ?? 0), Math.max(least, (high ?? 0) * 1.08, step)];
// The range of 96% of the values: a few slow steps must not flatten all others.
const most = (least, ...columns) => (u) => {
  const all = columns.map((column) => u.data[column].filter((value) => value !== null).sort((a, b) => a - b));
  return [0, Math.max(least, ...all.map((values) => 1.15 * (values[Math.floor(0.96 * (values.length - 1))] ?? 0)))];
};
const whole = (u, splits) => splits.map((value) => (Number.isInteger(value) ? value : ""));

const makeTau = () => ({
  scales: { x: { time: false }, y: { range: from(2) } },
  axes: axes("step", "tokens"),
  series: [
    {},
    { label: "of a step", stroke: "transparent", fill: colour("accepted"), paths: uPlot.paths.bars({ size: [0.7, 14] }), points: { show: false }, width: 0 },
    { label: "mean", stroke: colour("ink"), width: 2, points: { show: false } },
  ],
});
const makeAlpha = () => ({
  scales: { x: { time: false, range: (u, low, high) => [0.4, (high ?? 1) + 0.6] }, y: { range: [0, 1] } },
  axes: axes("depth", "accepted").map((axis, i) => (i ? { ...axis, values: (u, splits) => splits.map((v) => `${Math.round(100 * v)}%`) } : { ...axis, values: whole })),
  series: [{}, { label: "accepted", stroke: colour("accepted"), fill: colour("accepted"), paths: uPlot.paths.bars({ size: [0.6, 34] }), points: { show: false }, width: 0 }],
});
const makeSpeed = () => ({
  scales: { x: { time: false }, y: { range: from(10) } },
  axes: axes("seconds", "tokens/s"),
  series: [{}, { label: "tokens/s", stroke: colour("accepted"), width: 2, fill: colour("accepted", 0.12), points: { show: false } }],
});
const makeTimes = () => ({
  scales: { x: { time: false }, y: { range: most(1, 1) } },
  axes: axes("step", "ms"),
  series: [
    {},
    ...[...PHASES].reverse().map((phase) => ({ label: phase, stroke: colour(`phase-${phase}`), fill: colour(`phase-${phase}`), width: 0, paths: uPlot.paths.bars({ size: [0.8, 14] }), points: { show: false } })),
  ],
});
const makeCosts = () => ({
  scales: { x: { time: false, range: from(8) }, y: { range: most(1, 1, 2) } },
  axes: axes("nodes in one forward", "ms"),
  series: [
    {},
    { label: "measured", stroke: colour("ink"), width: 2, points: { show: true, size: 5, fill: colour("card") }, spanGaps: true },
    { label: "steps", stroke: colour("accepted"), paths: () => null, points: { show: true, size: 7, fill: colour("accepted", 0.35), width: 1 } },
    { label: "this step", stroke: colour("bonus"), paths: () => null, points: { show: true, size: 12, fill: "transparent", width: 3 } },
  ],
});
const makeRace = () => ({
  scales: { x: { time: false, range: from(0.1, 0.1) }, y: { range: from(4) } },
  axes: axes("seconds from the first token", "tokens"),
  series: [
    {},
    { label: "baseline", stroke: colour("muted"), width: 2, dash: [6, 4], points: { show: false }, spanGaps: true },
    { label: "speculative", stroke: colour("accepted"), width: 2.5, points: { show: false }, spanGaps: true },
  ],
});

function tauData(steps) {
  let sum = 0;
  const each = steps.map((step) => step.num_tokens);
  return [steps.map((_, i) => i + 1), each, each.map((count, i) => (sum += count) / (i + 1))];
}

function speedData(steps) {
  const WINDOW = 6;
  const start = steps[0]?.at ?? 0, x = [], y = [];
  for (let i = 1; i < steps.length; i++) {
    const first = Math.max(0, i - WINDOW);
    const tokens = steps.slice(first + 1, i + 1).reduce((sum, step) => sum + step.num_tokens, 0);
    const seconds = (steps[i].at - steps[first].at) / 1000;
    x.push((steps[i].at - start) / 1000);
    y.push(seconds > 0.001 ? tokens / seconds : null);
  }
  return [x, y];
}

// Stacked bars: the tallest is drawn first.
function timesData(steps) {
  const sums = steps.map(() => 0);
  const rows = PHASES.map((phase) => steps.map((step, i) => (sums[i] += step.seconds[phase] * 1000)));
  return [steps.map((_, i) => i + 1), ...rows.reverse()];
}

const spent = (step) => (step.seconds.verify + step.seconds.accept + step.seconds.commit) * 1000;

function costsData(curve, steps, chosen) {
  const most = Math.max(8, ...steps.map((step) => 1.5 * step.nodes.length));
  const rows = [
    ...curve.filter(([nodes], i) => nodes <= most || (i && curve[i - 1][0] < most)).map(([nodes, seconds]) => [nodes, seconds * 1000, null, null]),
    ...steps.map((step) => [step.nodes.length, null, spent(step), step === chosen ? spent(step) : null]),
  ].sort((a, b) => a[0] - b[0]);
  return [0, 1, 2, 3].map((column) => rows.map((row) => row[column]));
}

export function Plots({ run, step, costs, theme }) {
  const steps = run.traced, sum = figures(run);
  const share = (phase) => html`<span class="key"><i class=${`dot ${phase}`}></i>${phase} ${percent(sum.total ? sum.seconds[phase] / sum.total : 0)}</span> `;
  const curve = costs?.verify;
  return html`<div class="plots">
    <${Plot} title="Tokens per forward" note=${`tau ${sum.tau.toFixed(2)} over ${sum.forwards} steps`} make=${makeTau} data=${tauData(steps)} theme=${theme} />
    <${Plot} title="Acceptance by depth" note=${sum.alpha.length ? sum.alpha.slice(0, 6).map((each) => percent(each.rate)).join(" · ") : "no drafts yet"}
      make=${makeAlpha} data=${[sum.alpha.map((_, i) => i + 1), sum.alpha.map((each) => each.rate)]} theme=${theme} />
    <${Plot} title="Tokens per second" note=${`${short(sum.speed)} by the sum of step times`} make=${makeSpeed} data=${speedData(steps)} theme=${theme} />
    <${Plot} title="Where the time goes" note=${html`<span class="keys">${PHASES.map(share)}</span>`} make=${makeTimes} data=${timesData(steps)} theme=${theme} />
    ${curve
      ? html`<${Plot} title="Cost of a forward on this machine" make=${makeCosts} data=${costsData(curve, steps, step)} theme=${theme}
          note=${step ? `this step: ${step.nodes.length} nodes, ${short(spent(step))} ms; line: learned` : "line: learned from steps; dots: steps"} />`
      : html`<figure class="plot"><figcaption><strong>Cost of a forward on this machine</strong></figcaption>
          <p class="empty">${costs?.why ?? "Reading the costs…"}</p></figure>`}
  </div>`;
}

// Tokens over seconds for two runs on one clock.
export function Race({ lanes, until, theme }) {
  const rows = lanes.flatMap((run, lane) => {
    let sum = 0;
    return run.steps.map((step) => {
      sum += step.num_tokens ?? 1;
      return [(step.at - run.steps[0].at) / 1000, lane, sum];
    });
  }).filter(([at]) => at <= until).sort((a, b) => a[0] - b[0]);
  const data = [rows.map((row) => row[0]), rows.map((row) => (row[1] === 0 ? row[2] : null)), rows.map((row) => (row[1] === 1 ? row[2] : null))];
  return html`<${Plot} title="Tokens on one clock" note="dashed: baseline; solid: speculative" make=${makeRace} data=${data} theme=${theme} tall=${210} />`;
}
