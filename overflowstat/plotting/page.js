"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const { places, panels, views, texts, ...given } = JSON.parse($("data").textContent);
const NAN = 1, INF = 2, BAD = 4;
const FONT = '11px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif';
const LEFT = 58, RIGHT = 10, TOP = 4, LANE = 16, GROUPS = 20, LETTERS = 30;
const NAMES = { output: "outputs", input: "inputs", weight: "weights", gradient: "gradients" };
const MOST_ROWS = 500, MOST_LINES = 14;

// Every name is only ever the text of a node, or of a canvas.
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// What is drawn: columns[from..to) of the places of a view, in each panel.
const state = { view: null, columns: [], from: 0, to: 0, cursor: -1, panel: 0 };

const number = (value) => typeof value === "string" ? (value === "inf" ? Infinity : -Infinity) : value;
for (const view of views) {
  // By panel and place; -Infinity is zero, null that there is none.
  view.at = view.spans.map((spans) => {
    const at = new Array(places.length).fill(null);
    for (const [place, low, high, left, marks] of spans) {
      at[place] = { low: number(low), high: number(high), left: number(left), marks };
    }
    return at;
  });
  view.places = places.map((_, place) => place).filter((place) => view.at.some((at) => at[place]));
}
for (const panel of panels) {
  panel.calls = new Map(panel.calls);
  panel.isBad = new Set(panel.bad);
}

const over = (place, pick) => state.view.at.map((at) => at[place]).filter(Boolean).map(pick);
const largest = (place) => Math.max(...over(place, (s) => s.marks & (NAN | INF) ? Infinity : s.high ?? -Infinity));
const smallest = (place) => Math.min(...over(place, (s) => s.low ?? Infinity));
const nearest = (place) => Math.min(...over(place, (s) => s.left ?? Infinity));
function change(place) {
  const found = over(place, (s) => s.marks & (NAN | INF) ? Infinity : s.high).filter((high) => high !== null);
  const [low, high] = [Math.min(...found), Math.max(...found)];
  return found.length < 2 || low === high ? 0 : high - low;
}
// By what columns are sorted, ascending.
const ORDERS = {
  "as they ran": null,
  "by name": (place) => places[place][0],
  "largest abs max first": (place) => -largest(place),
  "smallest abs min first": smallest,
  "nearest to their limit first": nearest,
  "largest change first": (place) => -change(place),
};

// Choosing.

function choose() {
  const held = state.columns[state.cursor];
  state.view = views[$("part").value];
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (place) => words.every((word) => places[place][0].toLowerCase().includes(word));
  state.columns = state.view.places.filter(fits);
  const order = ORDERS[$("order").value];
  if (order) {
    const keys = new Map(state.columns.map((place) => [place, order(place)]));
    const compare = (a, b) => a < b ? -1 : a > b ? 1 : 0;
    state.columns.sort((a, b) => compare(keys.get(a), keys.get(b)) || a - b);
  }
  const count = state.columns.length, all = state.view.places.length;
  $("count").textContent = words.length ? `${count} of ${all} calls` : `${all} calls`;
  moveCursor(state.columns.indexOf(held), false);
  show(0, count);
  if ($("table").open) fillTable();
}

function show(from, to) {
  const count = state.columns.length;
  if (!count) from = to = 0;
  const width = Math.max(Math.min(3, count), Math.min(count, Math.round(to - from)));
  state.from = Math.max(0, Math.min(count - width, Math.round(from)));
  state.to = state.from + width;
  const isAll = width === count;
  for (const id of ["wider", "all"]) $(id).disabled = isAll;
  $("back").disabled = state.from === 0;
  $("on").disabled = state.to === count;
  $("closer").disabled = width <= 3;
  draw();
}

function zoom(factor) {
  const width = (state.to - state.from) * factor;
  const isSeen = state.cursor >= state.from && state.cursor < state.to;
  const middle = isSeen ? state.cursor + 0.5 : (state.from + state.to) / 2;
  const share = (middle - state.from) / (state.to - state.from);
  show(middle - width * share, middle + width * (1 - share));
}

const pan = (share) => {
  const step = share * (state.to - state.from);
  show(state.from + step, state.to + step);
};

function moveCursor(index, tells = true) {
  state.cursor = Math.max(-1, Math.min(state.columns.length - 1, index));
  if (state.cursor >= 0 && (state.cursor < state.from || state.cursor >= state.to) && tells) {
    const width = state.to - state.from;
    show(state.cursor - width / 2, state.cursor + width / 2);
  }
  for (const panel of panels) placeCursor(panel);
  if (state.cursor >= 0 && tells) tell(); else $("reading").hidden = true;
}

function nextBad() {
  const isBad = (place) => panels[state.panel].isBad.has(place);
  for (let pass = 0; pass < panels.length + 1; pass++) {
    for (let i = pass ? 0 : state.cursor + 1; i < state.columns.length; i++) {
      if (isBad(state.columns[i])) return goTo(state.panel, i);
    }
    state.panel = (state.panel + 1) % panels.length;
  }
}

function goTo(panel, index) {
  state.panel = panel;
  panels[panel].box.focus({ preventScroll: true });
  panels[panel].box.scrollIntoView({ block: "nearest" });
  moveCursor(index);
}

// Drawing.

let colours, isDue = false;
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ground", "text", "muted", "grid", "edge", "floor", "span", "peak", "limit", "call", "bad"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    panels.forEach((panel, i) => { panel.isDrawn = false; if (panel.isSeen) drawPanel(panel, i); });
  });
}

const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const i = panels.findIndex((panel) => panel.box === target);
    panels[i].isSeen = isIntersecting;
    if (isIntersecting && !panels[i].isDrawn) drawPanel(panels[i], i);
  }
}, { rootMargin: "200px" });

const fullName = (place) => places[place][2] ? `${places[place][0]} (${places[place][2]})` : places[place][0];
function shortened(text, most) {
  const letters = [...text];
  if (letters.length <= most) return text;
  const end = letters.slice(letters.length - most + 1), dot = end.indexOf(".");
  return "\u2026" + end.slice(dot < end.length - 1 ? dot + 1 : 0).join("");
}

function layout(panel, i) {
  const width = panel.canvas.clientWidth, inner = Math.max(10, width - LEFT - RIGHT);
  const step = inner / Math.max(1, state.to - state.from);
  const isLast = i === panels.length - 1;
  const shown = state.columns.slice(state.from, state.to);
  const longest = Math.max(0, ...shown.slice(0, 300).map((place) => fullName(place).length));
  const names = step < 13 ? "groups" : step > 7 * Math.min(longest, LETTERS) ? "flat" : "upright";
  const below = !isLast ? 6 : names === "upright" ? Math.min(longest, LETTERS) * 6.3 + 10 : GROUPS;
  const body = panels.length === 1 ? 380 : panels.length < 4 ? 230 : 160;
  return { width, inner, step, names, isLast, body, height: TOP + body + below };
}

function drawPanel(panel, i) {
  const at = layout(panel, i), { step, body } = at;
  if (!at.width) return;
  panel.isDrawn = true;
  const ratio = window.devicePixelRatio || 1;
  panel.canvas.style.height = at.height + "px";
  panel.canvas.width = Math.round(at.width * ratio);
  panel.canvas.height = Math.round(at.height * ratio);
  const c = panel.canvas.getContext("2d");
  c.scale(ratio, ratio);
  c.font = FONT;
  const [bottom, top] = $("whole").checked ? state.view.whole : state.view.scale;
  const first = TOP + 2 * LANE, last = TOP + body - LANE;
  const y = (decade) => decade === -Infinity ? last + LANE / 2 : last - (decade - bottom) / (top - bottom) * (last - first);
  const x = (column) => LEFT + (column - state.from) * step;
  const box = (colour, left, up, width, height) => { c.fillStyle = colour; c.fillRect(left, up, width, height); };

  box(colours.ground, 0, 0, at.width, at.height);

  // Bad calls, then the lanes of what has no place on the scale.
  for (let k = state.from; k < state.to; k++) {
    if (!panel.isBad.has(state.columns[k])) continue;
    const left = Math.floor(x(k));
    while (k + 1 < state.to && panel.isBad.has(state.columns[k + 1])) k++;
    box(colours.call, left, TOP, Math.max(2, Math.ceil(x(k + 1)) - left), body);
  }
  box(colours.floor, LEFT, last, at.inner, LANE);
  c.textBaseline = "middle";
  c.textAlign = "right";
  const label = (text, height, colour = colours.muted) => { c.fillStyle = colour; c.fillText(text, LEFT - 6, height); };
  label("NaN", TOP + LANE / 2);
  label("inf", TOP + 1.5 * LANE);
  label("0", last + LANE / 2);
  const every = Math.max(1, Math.ceil((top - bottom) / Math.max(2, (last - first) / 26)));
  for (let decade = bottom; decade <= top; decade++) {
    if (decade % every) continue;
    box(colours.grid, LEFT, Math.round(y(decade)), at.inner, 1);
    if (last - y(decade) < 7 || y(decade) - first < 5) continue;
    label(Math.abs(decade) < 4 ? String(10 ** decade >= 1 ? 10 ** decade : (10 ** decade).toFixed(-decade))
                               : `1e${decade}`, y(decade));
  }
  box(colours.edge, LEFT, first, at.inner, 1);
  box(colours.edge, LEFT, TOP + LANE, at.inner, 1);

  // Numbers: from smallest to largest, and the largest once more, which no neighbour is to cover.
  const spans = state.view.at[i];
  const gap = step >= 5 ? Math.min(step * 0.2, 8) : 0;
  const bar = (k) => {
    const left = Math.floor(x(k) + gap);
    return [left, Math.max(1, Math.ceil(x(k + 1) - gap) - left)];
  };
  for (const isPeak of [false, true]) {
    c.fillStyle = isPeak ? colours.peak : colours.span;
    for (let k = state.from; k < state.to; k++) {
      const span = spans[state.columns[k]];
      if (!span || span.high === null) continue;
      const [left, width] = bar(k), up = Math.round(y(span.high));
      if (isPeak) c.fillRect(left, up - 1, width, 2);
      else c.fillRect(left, up, width, Math.max(1, y(span.low) - up));
    }
  }

  // Limits. Those beyond the scale are told at its edge.
  c.textAlign = "left"; // the right end is where a run goes bad
  let lowest = Infinity;
  for (const [decade, text] of [...state.view.limits]) {
    if (decade < bottom || decade > top) continue;
    const height = Math.round(y(decade)) + 0.5;
    c.strokeStyle = c.fillStyle = colours.limit;
    c.setLineDash([5, 4]);
    c.beginPath();
    c.moveTo(LEFT, height);
    c.lineTo(at.width - RIGHT, height);
    c.stroke();
    const under = height - 8 < first ? height + 8 : height - 8;
    const isTold = body > 200 || i === 0 || text.includes(" max ");
    if (isTold && Math.abs(under - lowest) > 11) { note(text, under); lowest = under; }
  }
  c.setLineDash([]);
  const above = state.view.limits.filter(([decade]) => decade > top).map(([, text]) => "\u2191 " + text);
  if (above.length) note(above.join("   "), first + 9);
  const beneath = state.view.limits.filter(([decade]) => decade < bottom).map(([, text]) => "\u2193 " + text);
  if (beneath.length && body > 200) note(beneath.join("   "), last - 9);
  function note(text, height) {
    c.strokeStyle = colours.ground;
    c.lineWidth = 3;
    c.lineJoin = "round";
    c.setLineDash([]);
    c.strokeText(text, LEFT + 5, height, at.inner - 8);
    c.fillStyle = colours.limit;
    c.fillText(text, LEFT + 5, height, at.inner - 8);
    c.lineWidth = 1;
  }

  // Marks, by shape as well as by colour and height.
  for (let k = state.from; k < state.to; k++) {
    const span = spans[state.columns[k]];
    if (!span || !(span.marks & (NAN | INF))) continue;
    const colour = span.marks & BAD ? colours.bad : colours.muted;
    for (const [kind, height] of [[NAN, TOP + LANE / 2], [INF, TOP + 1.5 * LANE]]) {
      if (!(span.marks & kind)) continue;
      if (step < 9) box(colour, Math.floor(x(k)), height - 5, Math.max(2, step * 0.8), 10);
      else mark(c, kind, x(k) + step / 2, height, colour, span.marks & BAD);
    }
  }
  if (panel.bad.length && !ORDERS[$("order").value]) {
    const k = state.columns.indexOf(state.view.places.find((place) => panel.isBad.has(place)));
    if (k >= state.from && k < state.to) box(colours.bad, Math.floor(x(k)), TOP, 2, body);
  }
  c.strokeStyle = colours.edge;
  c.strokeRect(LEFT + 0.5, TOP + 0.5, at.inner - 1, body - 1);
  if (at.isLast) drawNames(c, at, x, TOP + body);
  if (!state.columns.length) {
    c.textAlign = "center";
    c.fillStyle = colours.muted;
    c.fillText("No module has such a name.", LEFT + at.inner / 2, (first + last) / 2);
  }
  placeCursor(panel);
}

function mark(c, kind, x, y, colour, isFilled) {
  const r = 4.5;
  c.strokeStyle = c.fillStyle = colour;
  c.lineWidth = isFilled ? 2.2 : 1.2;
  c.beginPath();
  if (kind === NAN) {
    c.moveTo(x - r, y - r); c.lineTo(x + r, y + r);
    c.moveTo(x - r, y + r); c.lineTo(x + r, y - r);
  } else {
    c.moveTo(x, y - r); c.lineTo(x + r, y + r); c.lineTo(x - r, y + r); c.closePath();
    if (isFilled) c.fill();
  }
  c.stroke();
  c.lineWidth = 1;
}

function drawNames(c, at, x, down) {
  c.fillStyle = colours.muted;
  if (at.names === "groups") {
    if (ORDERS[$("order").value]) {
      c.textAlign = "center";
      c.fillText(`${$("order").value}; zoom in for names`, LEFT + at.inner / 2, down + GROUPS / 2);
      return;
    }
    const names = state.columns.slice(state.from, state.to).map((place) => places[place][0]);
    const starts = groupStarts(names, Math.max(1, Math.floor(at.inner / 90)));
    c.textAlign = "left";
    starts.forEach(([k, name], i) => {
      const left = x(state.from + k);
      const right = i + 1 < starts.length ? x(state.from + starts[i + 1][0]) : LEFT + at.inner;
      c.fillStyle = colours.edge;
      c.fillRect(Math.floor(left), down, 1, GROUPS - 4);
      const letters = Math.floor((right - left - 6) / 6.3);
      c.fillStyle = colours.muted;
      if (letters > 2) c.fillText(shortened(name, letters), left + 4, down + GROUPS / 2);
    });
    return;
  }
  for (let k = state.from; k < state.to; k++) {
    const text = shortened(fullName(state.columns[k]), LETTERS), middle = x(k) + at.step / 2;
    const isBad = panels.some((panel) => panel.isBad.has(state.columns[k]));
    c.fillStyle = isBad ? colours.bad : colours.muted;
    if (at.names === "flat") {
      c.textAlign = "center";
      c.fillText(text, middle, down + GROUPS / 2);
    } else {
      c.save();
      c.translate(middle, down + 5);
      c.rotate(-Math.PI / 2);
      c.textAlign = "right";
      c.fillText(text, 0, 0);
      c.restore();
    }
  }
}

// As group_starts in chart.py.
function groupStarts(names, most) {
  const parts = names.map((name) => name.split("."));
  const deepest = parts.reduce((deep, part) => Math.max(deep, part.length), 1);
  let fitting = [];
  for (let depth = 1; depth <= deepest; depth++) {
    const starts = [];
    parts.forEach((part, i) => {
      const prefix = part.slice(0, depth).join(".");
      if (!starts.length || !`${starts[starts.length - 1][1]}.`.startsWith(`${prefix}.`)) starts.push([i, prefix]);
    });
    if (starts.length > most) {
      const every = Math.ceil(starts.length / most);
      return 3 * fitting.length <= most ? starts.filter((_, i) => i % every === 0) : fitting;
    }
    fitting = starts;
  }
  return fitting;
}

function placeCursor(panel) {
  const inner = panel.canvas.clientWidth - LEFT - RIGHT;
  const step = inner / Math.max(1, state.to - state.from);
  const isShown = state.cursor >= state.from && state.cursor < state.to;
  panel.cursor.hidden = !isShown;
  if (isShown) {
    panel.cursor.style.left = `${LEFT + (state.cursor - state.from) * step}px`;
    panel.cursor.style.width = `${Math.max(2, step)}px`;
    panel.cursor.style.top = `${panel.canvas.offsetTop + TOP}px`;
    panel.cursor.style.height = `${layout(panel, 0).body}px`;
  }
}

// Telling the numbers of a call.

function tell(pointer) {
  const place = state.columns[state.cursor], panel = panels[state.panel];
  const [, className, about] = places[place];
  const lines = panel.calls.get(place);
  const table = element("table");
  const shown = state.view.part;
  const by = (line) => texts[line[1]] === shown ? 0 : 1;
  const sorted = [...(lines || [])].sort((a, b) => by(a) - by(b) || b[6] - a[6]);
  for (const line of sorted.slice(0, MOST_LINES)) {
    const [label, , what, low, high, remark, isBad] = line.map((item, i) => i < 6 ? texts[item] : item);
    const kind = remark ? `${what}; ${remark}` : what;
    table.append(element("tr", { className: isBad ? "bad" : by(line) ? "other" : "" },
      ...[label, low, high, kind].map((textContent) => element("td", { textContent }))));
  }
  const rest = sorted.length - MOST_LINES;
  const head = element("tr", {}, ...["", "abs min", "abs max", ""].map((textContent) => element("td", { textContent })));
  head.className = "other";
  if (sorted.length) table.prepend(head);
  const where = [className, about, `batch ${panel.number}`].filter(Boolean).join(", ");
  const box = $("reading");
  box.replaceChildren(
    element("strong", {}, element("bdi", { textContent: places[place][0] })),
    element("small", {}, element("bdi", { textContent: where })), table,
    ...(rest > 0 ? [element("small", { textContent: `and ${rest} more` })] : []),
    ...(lines ? [] : [element("small", { textContent: ": not called in this batch" })]));
  box.hidden = false;
  panel.box.setAttribute("aria-valuenow", state.cursor);
  panel.box.setAttribute("aria-valuemax", state.columns.length - 1);
  panel.box.setAttribute("aria-valuetext", `${places[place][0]}, ${where}: ` + sorted.slice(0, MOST_LINES).map((line) => {
    const [label, , what, low, high, remark] = line.map((item, i) => i < 6 ? texts[item] : item);
    return `${label} ${low ? `${low} to ${high}` : ""} ${remark || what}`;
  }).join("; "));
  const chart = panel.canvas.getBoundingClientRect();
  const step = (chart.width - LEFT - RIGHT) / (state.to - state.from);
  state.isPointed = Boolean(pointer);
  const room = { x: document.documentElement.clientWidth, y: window.innerHeight };
  const { width, height } = box.getBoundingClientRect();
  const left = pointer ? pointer.x : chart.left + LEFT + (state.cursor - state.from + 1) * step;
  const under = chart.top + TOP + layout(panel, 0).body;
  const top = pointer ? pointer.y : under + height + 24 < room.y ? under - 8 : chart.top - height - 40;
  const right = left + 16 + width > room.x - 8 ? left - 16 - width : left + 16;
  box.style.left = `${Math.max(8, Math.min(right, room.x - width - 8))}px`;
  box.style.top = `${Math.max(8, Math.min(top + 16, room.y - height - 8))}px`;
}

// A table for those who cannot see the charts, or want to copy from them.

function fillTable() {
  const head = element("tr", {}, ...["module", "class", "what", "batch", "abs min", "abs max", "powers of 2 left"].map((textContent, i) =>
    element("th", { textContent, scope: "col", className: i > 2 ? "number" : "" })));
  const body = element("tbody");
  let count = 0;
  for (const [k, place] of state.columns.entries()) {
    panels.forEach((panel, i) => {
      const span = state.view.at[i][place];
      if (!span || count++ >= MOST_ROWS) return;
      const name = element("button", { type: "button", textContent: places[place][0], onclick: () => goTo(i, k) });
      const kinds = [span.marks & NAN && "nan", span.marks & INF && "inf"].filter(Boolean).join(" ");
      const about = [places[place][2], kinds].filter(Boolean).join(", ");
      const numbers = [panel.number, magnitude(span.low), magnitude(span.high), span.left === null ? "" : span.left.toFixed(1)];
      body.append(element("tr", { className: panel.isBad.has(place) ? "bad" : "" },
        element("td", {}, name), element("td", { textContent: places[place][1] }), element("td", { textContent: about }),
        ...numbers.map((textContent) => element("td", { textContent, className: "number" }))));
    });
  }
  const caption = `${NAMES[state.view.part]}, ${$("order").value}` +
    (count > MOST_ROWS ? `: the first ${MOST_ROWS} of ${count} rows; a search makes them fewer` : "");
  $("table").querySelector(".scroller").replaceChildren(
    element("table", {}, element("caption", { textContent: caption }), element("thead", {}, head), body));
}

function magnitude(decade) {
  if (decade === null) return "";
  const value = decade === -Infinity ? 0 : 10 ** decade;
  return value && (value < 1e-3 || value >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(3)));
}

// The page.

function columnAt(panel, clientX) {
  const chart = panel.canvas.getBoundingClientRect();
  const share = (clientX - chart.left - LEFT) / (chart.width - LEFT - RIGHT);
  return share < 0 || share >= 1 ? -1 : state.from + Math.floor(share * (state.to - state.from));
}

const KEYS = {
  ArrowLeft: () => moveCursor(Math.max(0, state.cursor - 1)),
  ArrowRight: () => moveCursor(state.cursor + 1),
  Home: () => moveCursor(0),
  End: () => moveCursor(state.columns.length - 1),
  PageUp: () => pan(-0.8),
  PageDown: () => pan(0.8),
  Escape: () => moveCursor(-1),
  "+": () => zoom(0.5),
  "=": () => zoom(0.5),
  "-": () => zoom(2),
  0: () => show(0, state.columns.length),
  n: nextBad,
  "/": () => $("search").focus(),
};

function build(panel, i) {
  panel.canvas = element("canvas");
  panel.cursor = element("div", { className: "cursor", hidden: true });
  const range = element("div", { className: "range", hidden: true });
  const bad = panel.bad.length ? `, ${panel.bad.length} of ${panel.calls.size} calls bad` : "";
  panel.box = element("figure", { tabIndex: 0 },
    element("figcaption", {}, `Batch ${panel.number}`, element("span", { textContent: bad })),
    panel.canvas, panel.cursor, range);
  panel.box.setAttribute("role", "slider");
  panel.box.setAttribute("aria-label", `Magnitudes of batch ${panel.number}${bad}, by module call`);
  panel.box.setAttribute("aria-valuenow", 0);
  $("panels").append(panel.box);
  seen.observe(panel.box);

  let start = null;
  const canvas = panel.canvas;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    start = event.clientX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (start !== null && Math.abs(event.clientX - start) > 4) {
      const edge = canvas.getBoundingClientRect().left;
      range.hidden = false;
      range.style.left = `${Math.min(start, event.clientX) - edge}px`;
      range.style.width = `${Math.abs(event.clientX - start)}px`;
      range.style.top = `${canvas.offsetTop + TOP}px`;
      range.style.height = panel.cursor.style.height || "100px";
    }
    const column = columnAt(panel, event.clientX);
    if (column < 0) return;
    state.panel = i;
    moveCursor(column, false);
    tell({ x: event.clientX, y: event.clientY });
  });
  canvas.addEventListener("pointerup", (event) => {
    if (start !== null && !range.hidden) {
      const chart = canvas.getBoundingClientRect(), inner = chart.width - LEFT - RIGHT;
      const [from, to] = [start, event.clientX].sort((a, b) => a - b).map((edge) =>
        state.from + Math.max(0, Math.min(1, (edge - chart.left - LEFT) / inner)) * (state.to - state.from));
      show(Math.floor(from), Math.ceil(to));
    }
    start = null;
    range.hidden = true;
  });
  canvas.addEventListener("pointercancel", () => { start = null; range.hidden = true; });
  canvas.addEventListener("pointerleave", () => { if (start === null) $("reading").hidden = true; });
  canvas.addEventListener("dblclick", () => show(0, state.columns.length));
  panel.box.addEventListener("focus", () => { state.panel = i; if (state.cursor >= 0 && panel.box.matches(":focus-visible")) tell(); });
  panel.box.addEventListener("blur", () => { $("reading").hidden = true; });
  panel.box.addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!act || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    act();
  });
}

views.forEach((view, i) => $("part").append(element("option", { value: i, textContent: NAMES[view.part] })));
$("part").value = views.findIndex((view) => view.part === given.shown);
for (const name of Object.keys(ORDERS)) {
  if (panels.length > 1 || !name.includes("change")) $("order").append(element("option", { value: name, textContent: name }));
}
const acts = { closer: () => zoom(0.5), wider: () => zoom(2), back: () => pan(-0.8), on: () => pan(0.8),
               all: () => show(0, state.columns.length), bad: nextBad };
for (const [id, act] of Object.entries(acts)) $(id).addEventListener("click", act);
$("bad").hidden = !panels.some((panel) => panel.bad.length);
for (const id of ["part", "order"]) $(id).addEventListener("change", choose);
$("search").addEventListener("input", choose);
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") { $("search").value = ""; choose(); }
});
$("whole").addEventListener("change", draw);
$("table").addEventListener("toggle", () => { if ($("table").open) fillTable(); });
window.addEventListener("resize", draw);
window.addEventListener("beforeprint", () => panels.forEach(drawPanel));
window.addEventListener("scroll", () => {
  if ($("reading").hidden) return;
  if (state.isPointed) $("reading").hidden = true; else tell();
}, { passive: true });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
for (const id of ["controls", "legend", "table", "help"]) $(id).hidden = false;
readColours();
panels.forEach(build);
choose();
if (given.first) {
  const [panel, place] = given.first;
  state.panel = panel;
  moveCursor(state.columns.indexOf(place), false);
}
document.documentElement.dataset.drawn = "yes";
})();
