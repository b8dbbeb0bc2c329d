// A step's tree: the drafted tokens, those that the target kept, and the token that it added.
import { hierarchy, tree } from "./vendor/d3-hierarchy.js";
import { html, useEffect, useRef } from "./vendor/htm-preact.js";
import { percent, spoken, visible } from "./run.js";

const ROW = 30, HEIGHT = 22, LETTER = 7.4, GAP = 34, PAD = 8;

// Positions of all nodes and the bonus token: boxes, edges, and the size of the picture.
export function layout(step) {
  const nodes = step.nodes.map((node, index) => ({ ...node, index, children: [] }));
  for (const node of nodes) if (node.parent >= 0) nodes[node.parent].children.push(node);
  const last = nodes[step.path[step.path.length - 1] ?? 0];
  const bonus = { ...step.bonus, index: -1, isBonus: true, depth: last.depth + 1, children: [] };
  last.children = [...last.children, bonus];
  const placed = tree().nodeSize([ROW, 1]).separation(() => 1)(hierarchy(nodes[0]));
  const widths = [];
  const boxes = placed.descendants().map((each) => {
    const node = each.data;
    const label = visible(node.text);
    const chance = node.index > 0 ? percent(node.chance) : "";
    const width = [...label].length * LETTER + 2 * PAD + (chance ? chance.length * 5.8 + 8 : 0);
    widths[each.depth] = Math.max(widths[each.depth] || 0, width);
    const kind = node.isBonus ? "bonus" : node.index === 0 ? "root" : node.kept ? "kept" : "rejected";
    return { node, label, chance, width, kind, depth: each.depth, y: each.x, above: each.parent?.data };
  });
  const starts = [2];
  widths.forEach((width, depth) => (starts[depth + 1] = starts[depth] + width + GAP));
  const top = Math.min(...boxes.map((box) => box.y)) - HEIGHT / 2 - 4;
  for (const box of boxes) Object.assign(box, { x: starts[box.depth], y: box.y - top });
  const byNode = new Map(boxes.map((box) => [box.node, box]));
  const edges = boxes.filter((box) => box.above).map((box) => ({ from: byNode.get(box.above), to: box }));
  return {
    boxes, edges,
    width: starts[starts.length - 1] - GAP + 2,
    height: Math.max(...boxes.map((box) => box.y)) + HEIGHT / 2 + 4,
  };
}

const summary = (step) => {
  const kept = step.path.slice(1).map((node) => `“${spoken(step.nodes[node].text)}”`).join(", ");
  return (
    `Draft tree: ${step.num_drafted} tokens drafted after “${spoken(step.nodes[0].text)}”, ${step.num_accepted} kept` +
    `${kept ? ` (${kept})` : ""}; the target added “${spoken(step.bonus.text)}”.`
  );
};

export function Tree({ step, chosen, onChoose }) {
  const frame = useRef(null);
  const { boxes, edges, width, height } = layout(step);
  useEffect(() => {
    frame.current.scrollLeft = 0;
    const root = boxes.find((box) => box.kind === "root");
    frame.current.scrollTop = Math.max(0, root.y - frame.current.clientHeight / 2);
  }, [step]);
  const edge = ({ from, to }) => {
    const x = from.x + from.width, middle = to.x - GAP / 2;
    return html`<path class=${`edge ${to.kind}`} d=${`M${x},${from.y}H${middle - 8}C${middle},${from.y} ${middle - 8},${to.y} ${middle + 6},${to.y}H${to.x}`} />`;
  };
  const box = ({ node, label, chance, kind, x, y, width: wide }) => html`
    <g class=${`node ${kind} ${node.index === chosen ? "chosen" : ""}`} transform=${`translate(${x},${y - HEIGHT / 2})`}
      onClick=${() => onChoose(node.index < 0 ? step.path[step.path.length - 1] : node.index)}>
      <rect width=${wide} height=${HEIGHT} rx="6" />
      ${node.chance !== null && node.index > 0 && html`<rect class="bar" x="0" y=${HEIGHT - 3} width=${Math.max(2, wide * Math.min(node.chance, 1))} height="3" rx="1.5" />`}
      <text x=${PAD} y="15">${label}</text>
      ${chance && html`<text class="chance" x=${wide - PAD} y="15" text-anchor="end">${chance}</text>`}
    </g>`;
  return html`<div class="tree" ref=${frame} tabindex="0" role="region" aria-label="Draft tree, scrolls">
    <svg role="img" aria-label=${summary(step)} width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`}>
      ${edges.filter((each) => each.to.kind === "rejected").map(edge)}
      ${edges.filter((each) => each.to.kind !== "rejected").map(edge)}
      ${boxes.map(box)}
    </svg>
  </div>`;
}

const FATE = { root: "pending", kept: "kept", rejected: "rejected", bonus: "added by the target" };

// The tree as a table, for screen readers and exact numbers.
export function TreeTable({ step, onChoose }) {
  const row = (node, index) => html`<tr class=${node.kept ? "kept" : ""}>
    <td class="num">${index}</td>
    <th scope="row"><button class="token" onClick=${() => onChoose(index)} aria-label=${`Token ${spoken(node.text)}, show the probabilities`}>${visible(node.text, 24)}</button></th>
    <td>${node.parent < 0 ? "–" : visible(step.nodes[node.parent].text, 18)}</td>
    <td class="num">${node.depth}</td>
    <td class="num">${node.parent < 0 ? "" : percent(node.chance) || "unknown"}</td>
    <td>${FATE[index === 0 ? "root" : node.kept ? "kept" : "rejected"]}</td>
  </tr>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="The tree as a table"><table class="nodes">
    <thead><tr><th scope="col">#</th><th scope="col">token</th><th scope="col">after</th><th scope="col">depth</th><th scope="col">chance</th><th scope="col">fate</th></tr></thead>
    <tbody>${step.nodes.map(row)}
      <tr class="bonus"><td></td><th scope="row" class="mono">${visible(step.bonus.text, 24)}</th><td>${visible(step.nodes[step.path[step.path.length - 1]].text, 18)}</td>
        <td class="num">${step.num_accepted + 1}</td><td></td><td>${FATE.bonus}</td></tr>
    </tbody>
  </table></div>`;
}
