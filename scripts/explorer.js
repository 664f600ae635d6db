// explorer.js -- the script of the page that explorer.py makes; DATA has its numbers.
//
// A click on a token makes it the query i. What depends on i is computed here, from what the trainer wrote:
//   logit_ij = q_i.k_j + B_ij     P_ij = e^logit_ij / sum over the visible j of e^logit_ij
// B is rounded to float32 where the kernels round, so it has their bits; the rest is float64.
"use strict";
const T = DATA.tokens.length, TILE = 64, LEAST = 2 ** -24 / T;      // as in scripts/heads.py: a tile lives above LEAST
const MARGIN = 52;                              // of the curves' labels, in pixels
const NEAR = 100;                               // tokens of the curves unless they show the whole text; fewer if narrow
const LETTER = 5.2;                             // pixels that a token's letter needs at least
const state = { query: Math.floor(0.4 * T), key: 0, by: "attention", span: NEAR, heads: DATA.models.map(() => 0) };
const $ = (selector, of = document) => of.querySelector(selector);
const make = (tag, to, properties = {}) => to.appendChild(Object.assign(document.createElement(tag), properties));
const clamp = x => Math.max(0, Math.min(1, x));
const digits = x => x.toFixed(2 - (Math.abs(x) >= 10) - (Math.abs(x) >= 100)).replace(/^-(0\.00)$/, "$1");
const percent = x => x < 1e-6 ? "< 0.0001 %" : (x < 0.0995 ? (100 * x).toPrecision(2) : (100 * x).toFixed(0)) + " %";
const minus = text => text.replace(/^-/, "−");

// ---------------------------------------------------------------------------------------------------------
// numbers

// the float32 arrays of a model: their bytes come sorted by place, and compressed
async function unpack(model) {
  const zipped = Uint8Array.from(atob(model.floats), c => c.charCodeAt(0));
  const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer()), n = planes.length / 4;
  const bytes = new Uint8Array(planes.length);
  for (let p = 0; p < 4; p++) for (let i = 0; i < n; i++) bytes[4 * i + p] = planes[p * n + i];
  const all = new Float32Array(bytes.buffer), read = ([first, count]) => all.subarray(first, first + count);
  model.losses = read(model.losses);
  for (const head of model.heads) {
    for (const name of ["q", "k", "S_offset", "g", "by_distance", "rows"]) head[name] &&= read(head[name]);
    head.HS = head.q.length / T;
    if (!head.S_offset) continue;
    head.S = Float64Array.from(head.S_offset, (offset, t) => head.S_origin[t >> 7] + offset);
    head.b = head.S.map((S, t) => S - (t > 0 ? head.S[t - 1] : 0));
  }
}

// |S_i - S_j| as cable.cuh computes it
function distance(head, i, j) {
  const between = Math.fround(head.S_origin[i >> 7] - head.S_origin[j >> 7]);
  return Math.abs(Math.fround(Math.fround(between + head.S_offset[i]) - head.S_offset[j]));
}

// B_ij
function bias(head, i, j) {
  if (head.by_distance) return head.by_distance[i - j];
  if (head.rows) return head.rows[i * (i + 1) / 2 + j];
  if (!head.S) return 0;
  const D = distance(head, i, j), a = head.inside ? head.g[i] * D : D;
  return head.log ? -(head.inside ? 1 : head.g[i]) * Math.log1p(a * a) : Math.fround(-head.g[i] * D);
}

function visible(model, head, i, j) {           // as AttentionMask in position/encoding.cuh
  const begin = model.begins.length ? model.begins[i] : 0;
  return j <= i && j >= begin && (!head.window || j > i - head.window || j < begin + model.sinks);
}

// of query i, for the keys 0 .. i: q_i.k_j, B_ij and P_ij; NaN and 0 where a key is hidden
function attention(model, head, i) {
  const { q, k, HS } = head, at = i * HS, scores = new Float64Array(i + 1), biases = new Float64Array(i + 1);
  const weights = new Float64Array(i + 1);
  let largest = -Infinity, sum = 0;
  for (let j = 0; j <= i; j++) {
    let dot = visible(model, head, i, j) ? 0 : NaN;
    for (let c = 0, of = j * HS; c < HS; c++) dot += q[at + c] * k[of + c];
    scores[j] = dot;
    biases[j] = dot === dot ? bias(head, i, j) : NaN;
    if (dot + biases[j] > largest) largest = dot + biases[j];
  }
  for (let j = 0; j <= i; j++) {
    const weight = Math.exp(scores[j] + biases[j] - largest);
    sum += weights[j] = weight === weight ? weight : 0;
  }
  for (let j = 0; j <= i; j++) weights[j] /= sum;
  return { scores, biases, weights };
}

// the largest weight of each tile of TILE queries and TILE keys
function tiles(model, head) {
  const n = Math.ceil(T / TILE), most = new Float64Array(n * n);
  for (let i = 0; i < T; i++) {
    const at = (i >> 6) * n, { weights } = attention(model, head, i);
    for (let j = 0; j <= i; j++) if (weights[j] > most[at + (j >> 6)]) most[at + (j >> 6)] = weights[j];
  }
  return most;
}

// ---------------------------------------------------------------------------------------------------------
// what colours the text: a share of the ink for token j, or undefined; and the ends of the scale

const COLOURS = {
  attention: { ends: ["0.01 %", "100 %"], of: (m, h, a, j) => a.weights[j] > 0 ? 1 + Math.log10(a.weights[j]) / 4 : 0 },
  bias: { ends: ["−16 nats", "0"], of: (m, h, a, j) => 1 + a.biases[j] / 16 },
  "step of S": { ends: ["0", "the largest"], of: (m, h, a, j) => h.b && h.b[j] / h.most_b, every: true },
  g: { ends: ["0", "the largest"], of: (m, h, a, j) => h.b && h.g[j] / h.most_g, every: true },
  loss: { ends: ["0", "8 nats"], of: (m, h, a, j) => m.losses[j] / 8, every: true },
};
const headOf = n => DATA.models[n].heads[state.heads[n]];

function paintText(n) {
  const model = DATA.models[n], head = headOf(n), { of, every } = COLOURS[state.by];
  model.attention = attention(model, head, state.query);
  head.most_b ??= head.b && Math.max(...head.b);
  head.most_g ??= head.b && Math.max(...head.g);
  model.spans.forEach((span, j) => {
    const share = every || j <= state.query ? of(model, head, model.attention, j) : 0;
    span.style.background = share > 0 ? `rgba(var(--hue), ${(0.72 * clamp(share)).toFixed(3)})` : "";
    span.classList.toggle("later", !every && j > state.query);
    span.classList.toggle("query", j === state.query);
    span.classList.toggle("over", j === state.key);
  });
}

const shown = token => token === "\n" ? "↵" : token === " " ? "␣" : token;
// a number, with all its digits as the title
const number = (name, value, text) => `<b data-of="${name}" title="${value}">${minus(text ?? digits(value))}</b>`;

// the sum that makes one weight
function paintReadout(n) {
  const model = DATA.models[n], head = headOf(n), { query: i, key: j } = state, a = model.attention;
  const [first, second] = model.readout.children;
  first.textContent = second.textContent = "";
  const pair = make("span", first), strong = t => Object.assign(document.createElement("b"), { textContent: shown(t) });
  pair.append("key ", strong(DATA.tokens[j]), ` at ${j}, `, j === i ? "the query itself" :
      `${Math.abs(i - j)} ${j < i ? "before" : "after"} the query `, j === i ? "" : strong(DATA.tokens[i]));
  let about = `<span><small>its loss</small> ${j > 0 ? number("loss", model.losses[j]) : "none"}</span>`;
  if (head.S) about += `<span><small>S</small> ${number("S", head.S[j])}</span>
      <span><small>g</small> ${number("g", head.g[j])}</span>`;
  first.insertAdjacentHTML("beforeend", about);
  if (j > i) return second.append("A causal query does not see what comes after it.");
  if (!visible(model, head, i, j)) return second.append("Hidden from this query: outside its window or document.");
  const B = a.biases[j], symbol = head.S ? "−g<sub>i</sub> |S<sub>i</sub> − S<sub>j</sub>|" : "B<sub>ij</sub>";
  const product = head.S && !head.log ? ` = ${minus(digits(-head.g[i]))} × ${digits(distance(head, i, j))}` : "";
  second.innerHTML = `<span><small>q·k / √HS</small> ${number("score", a.scores[j])}</span>
      <span><small>${head.log ? "B<sub>ij</sub>" : symbol}${product} =</small> ${number("bias", B)}</span>
      <span><small>logit</small> ${number("logit", a.scores[j] + B)}</span>
      <span><small>weight</small> ${number("weight", a.weights[j], percent(a.weights[j]))}</span>`;
}

// ---------------------------------------------------------------------------------------------------------
// curves along the text

// which tokens the curves show: [first, end)
function range() {
  const room = Math.max(10, Math.floor(($(".tracks").clientWidth - MARGIN) / LETTER));
  const span = state.span > NEAR ? T : Math.min(state.span, room);
  const first = Math.max(0, Math.min(T - span, state.query - Math.floor(0.8 * span)));
  return [first, Math.min(T, first + span)];
}

function tracksOf(model, head) {
  const { weights, biases } = model.attention, { S, g } = head;
  const sums = DATA.models.some((m, n) => headOf(n).S), [from, to] = range(), low = S && (from > 0 ? S[from - 1] : 0);
  model.mean ??= Float64Array.from(model.losses, (_, t) => {
    const around = model.losses.subarray(Math.max(1, t - 16), t + 17);
    return around.reduce((sum, x) => sum + x, 0) / around.length;
  });
  const seen = biases.slice(from).filter(isFinite), top = Math.max(0, ...seen);
  const bottom = Math.min(top - 0.1, Math.max(-20, Math.min(...seen)));
  return [
    { name: "attention of the query", values: weights, low: -4, high: 0, of: w => Math.log10(w), bars: true,
      ends: ["100 %", "0.01 %"] },
    { name: "bias of the query, in nats", values: biases, low: bottom, high: top,
      ends: [digits(top), digits(bottom)].map(minus) },
    ...(!sums ? [] : S ? [
      { name: "running sum S", values: S, low, high: S[to - 1] > low ? S[to - 1] : low + 1, sum: true,
        ends: [digits(S[to - 1]), digits(low)] },
      { name: "weight g", values: g, low: 0, high: Math.max(...g), ends: [digits(Math.max(...g)), "0"], thin: true },
    ] : [{ name: `${model.pos} keeps no sum` }, { name: "and weighs no query" }]),
    { name: "loss in nats; mean over 33", values: model.losses, low: 0, high: 8, ends: ["8", "0"],
      bars: true, mean: model.mean },
  ];
}

function paintTracks(n) {
  const model = DATA.models[n], head = headOf(n), canvas = model.tracks, ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight, style = getComputedStyle(canvas);
  const ink = style.getPropertyValue("--ink"), soft = style.getPropertyValue("--soft");
  const line = style.getPropertyValue("--line"), hue = alpha => `rgba(${style.getPropertyValue("--hue")}, ${alpha})`;
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio);
  c.font = "12px " + style.fontFamily;
  const [from, to] = range(), right = width - MARGIN, x = t => (t - from + 0.5) / (to - from) * right;
  const all = tracksOf(model, head), longest = Math.max(...DATA.tokens.slice(from, to).map(t => [...t].length));
  const letters = to - from <= NEAR && longest <= 2;
  const each = (height - (letters ? 20 : 0)) / all.length, near = to - from <= NEAR;
  const polyline = (values, y) => {
    c.beginPath();
    for (let t = from; t < Math.min(to, values.length); t++) {
      if (values[t] !== values[t]) continue;
      if (near) c.lineTo(x(t - 0.5), y(values[t]));     // a step for each token
      c.lineTo(x(near ? t + 0.5 : t), y(values[t]));
    }
    c.stroke();
  };
  all.forEach((track, row) => {
    const y0 = row * each + 20, y1 = (row + 1) * each - 6;
    c.fillStyle = soft;
    c.fillText(track.name, 0, y0 - 7);
    c.fillStyle = line;
    c.fillRect(0, y1, right, 1);
    if (!track.values) return;
    c.fillStyle = soft;
    c.fillText(track.ends[0], right + 8, y0 + 1);
    c.fillText(track.ends[1], right + 8, y1 + 1);
    const of = track.of ?? (v => v), y = v => y1 - (y1 - y0) * clamp((of(v) - track.low) / (track.high - track.low));
    c.strokeStyle = hue(1);
    c.lineWidth = track.thin && !near ? 1 : 1.6;
    if (track.bars) {
      c.fillStyle = hue(track.mean ? 0.3 : 0.9);
      for (let t = from; t < Math.min(to, track.values.length); t++) {
        c.fillRect(x(t - 0.5), y(track.values[t]), Math.max(1, right / (to - from) - (near ? 1 : 0)), 1e4);
      }
      c.clearRect(0, y1 + 1, width, height);
      if (track.mean) polyline(track.mean, y);
    } else polyline(track.values, y);
    if (track.sum && state.key < state.query) {         // what the sum has grown by since the key
      const { query: i, key: j } = state, S = track.values;
      c.fillStyle = hue(0.25);
      c.fillRect(Math.max(0, x(j)), y(S[i]), x(i) - Math.max(0, x(j)), y(S[j]) - y(S[i]));
    }
  });
  for (const [t, colour] of [[state.key, hue(1)], [state.query, ink]]) {
    c.fillStyle = colour;
    for (let row = 0; t >= from && t < to && row < all.length; row++) {     // not through a curve's name
      c.fillRect(Math.round(x(t)), row * each + 17, 1, each - 17);
    }
  }
  c.textAlign = "center";
  c.font = `${Math.min(14, right / (to - from) / 0.61 / longest)}px ui-monospace, monospace`;
  for (let t = from; letters && t < to; t++) {
    c.fillStyle = t === state.query ? ink : t === state.key ? hue(1) : soft;
    c.fillText(DATA.tokens[t].replace("\n", "/"), x(t), height - 4);       // as in a quotation of verse
  }
}

// ---------------------------------------------------------------------------------------------------------
// the page

const STATISTICS = [["entropy", s => digits(s.entropy) + " nats"],
  ["mean distance", s => digits(s.distance) + " tokens"], ["90 % of the weight within", s => s.window90 + " tokens"],
  ["live tiles", s => percent(s.live_tiles)], ["on the first token", s => percent(s.sink_weight[1])],
  ["weight g", s => s.g && `${digits(s.g[0])} to ${digits(s.g[2])}`],
  ["heads of the layer are dead", (s, heads) => {
    const layer = heads.map(h => h.statistics).filter(h => h.layer === s.layer);
    return s.dead === undefined ? undefined : `${layer.filter(h => h.dead).length} of ${layer.length}`;
  }]];

function paintHead(n) {
  const model = DATA.models[n], { statistics } = headOf(n);
  model.maps.forEach((map, m) => map.setAttribute("aria-pressed", m === state.heads[n]));
  model.list.textContent = "";
  for (const [name, value] of STATISTICS) {
    const shown = value(statistics, model.heads);
    if (shown === undefined) continue;
    const cell = make("div", model.list);
    make("dd", cell, { textContent: shown });
    make("dt", cell, { textContent: name });
  }
}

function paintMap(model, head, canvas) {
  const n = Math.ceil(T / TILE), c = canvas.getContext("2d"), image = c.createImageData(n, n);
  const hue = getComputedStyle(canvas).getPropertyValue("--hue").split(",").map(Number);
  head.tiles ??= tiles(model, head);
  head.tiles.forEach((w, at) => {
    const ink = w > LEAST ? 0.12 + 0.88 * clamp(1 + Math.log10(w) / 7) : 0;
    image.data.set([...hue, 255 * ink], 4 * at);
  });
  c.putImageData(image, 0, 0);
}

const soon = () => new Promise(done => setTimeout(done));
async function paintMaps() {
  delete document.documentElement.dataset.ready;                // as long as #busy is there
  for (const model of DATA.models) for (const [h, head] of model.heads.entries()) {
    $("#busy").textContent = `drawing ${model.pos}'s head ${h + 1} of ${model.heads.length} …`;
    await soon();
    paintMap(model, head, $("canvas", model.maps[h]));
  }
  document.documentElement.dataset.ready = "yes";
}

function paint(what = ["head", "text", "readout", "tracks"]) {
  const painters = { head: paintHead, text: paintText, readout: paintReadout, tracks: paintTracks };
  for (const name of what) DATA.models.forEach((_, n) => painters[name](n));
  if (!what.includes("head")) return;
  const colours = COLOURS[state.by];
  [$("#least").textContent, $("#most").textContent] = colours.ends;
  for (const button of $("#by").children) button.setAttribute("aria-pressed", button.textContent === state.by);
  for (const button of $("#span").children) button.setAttribute("aria-pressed", button.value == state.span);
  history.replaceState(null, "", "#" + new URLSearchParams({ q: state.query, k: state.key, by: state.by,
      span: state.span, heads: state.heads.join(), theme: document.documentElement.dataset.theme }));
}

function hover(t) {
  if (t === state.key || !(t >= 0 && t < T)) return;
  for (const { spans } of DATA.models) {
    spans[state.key].classList.remove("over");
    spans[t].classList.add("over");
  }
  state.key = t;
  paint(["readout", "tracks"]);
}

function choose(t) {
  state.query = Math.max(0, Math.min(T - 1, t));
  paint();
}

function show(t) {                              // scrolls the texts
  for (const { spans, text } of DATA.models) text.scrollTop = spans[t].offsetTop - text.clientHeight / 2;
}

function toggleTheme() {
  const { dataset } = document.documentElement;
  dataset.theme = dataset.theme === "dark" ? "light" : "dark";
  paint();
  paintMaps();
}

function build(model, n) {
  const section = make("section", $("main"), { className: "model" }), header = make("header", section);
  const title = make("div", header), layers = 1 + model.heads.at(-1).layer, NH = model.heads.length / layers;
  make("h2", title, { textContent: model.pos });
  make("p", title, { className: "soft", title: model.path,
    textContent: `trained at ${model.T_train} tokens · loss ${model.loss.toFixed(3)} nats` });
  model.list = make("dl", title);
  const maps = make("div", header, { className: "maps" }), room = `(100vw - 80px) / ${NH} - 12px`;
  maps.style.gridTemplateColumns = `auto repeat(${NH}, auto)`;
  make("label", maps, { textContent: layers * NH < 40 ? "layer" : "" });
  for (let h = 0; h < NH; h++) make("label", maps, { textContent: NH <= 8 ? `head ${h}` : h });
  model.maps = model.heads.map((head, m) => {
    if (m % NH === 0) make("label", maps, { textContent: head.layer });
    const button = make("button", maps, { title: `layer ${head.layer}, head ${head.head}: live tiles, query by key`,
        onclick: () => { state.heads[n] = m; paint(); } }), tiles = Math.ceil(T / TILE);
    const canvas = make("canvas", button, { width: tiles, height: tiles });
    const size = `max(4px, min(64px, 300px / ${NH}, var(--most) / ${layers}, ${room}))`;
    canvas.style.width = canvas.style.height = size;
    return button;
  });
  make("label", maps, { textContent: `live ${TILE} × ${TILE} tiles, by largest weight` });
  const text = model.text = make("div", section, { className: "text" });
  if (DATA.tokens.every(token => /^\d+$/.test(token))) text.className += " ids";
  model.spans = DATA.tokens.map((token, t) => {          // lines flow on; an empty line ends a paragraph
    const ends = token.endsWith("\n") && (token.length > 1 || (DATA.tokens[t - 1] ?? "").endsWith("\n"));
    const marks = token.replaceAll("\n", "↵ ") + (ends ? "\n" : "");
    return make("span", text, { textContent: marks, className: token.includes("\n") ? "break" : "" });
  });
  const at = event => model.spans.indexOf(event.target);
  text.onmouseover = event => hover(at(event));
  text.onclick = event => { if (at(event) >= 0) choose(at(event)); };
  text.onscroll = () => { for (const m of DATA.models) m.text.scrollTop = text.scrollTop; };
  model.readout = make("div", section, { className: "readout" });
  make("p", model.readout);
  make("p", model.readout);
  model.tracks = make("canvas", section, { className: "tracks" });
  const place = event => {
    const [from, to] = range();
    return Math.min(to - 1, from + Math.floor(event.offsetX / (model.tracks.clientWidth - MARGIN) * (to - from)));
  };
  model.tracks.onmousemove = event => hover(place(event));
  model.tracks.onclick = event => { choose(place(event)); show(state.query); };
}

// the head that sees farthest; one whose bias stays below a nat because its sum hardly grows sees all, and comes late
function farthest(heads) {
  const far = heads.map(({ S, statistics }) => statistics.distance * (S ? Math.min(1, S[T - 1] * statistics.g[1]) : 1));
  return far.indexOf(Math.max(...far));
}

async function start() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const whole = (text, end) => /^\d{1,9}$/.test(text) && Number(text) < end ? Number(text) : undefined;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = ["light", "dark"].find(name => name === asked.get("theme")) ?? dark;
  $("#about").innerHTML = `${T.toLocaleString("en")} tokens of <span></span><br>click one: what it sees is coloured`;
  $("#about span").textContent = DATA.text;
  await Promise.all(DATA.models.map(unpack));
  if (DATA.models.length === 1) document.body.className = "one";
  for (const [value, name] of [[NEAR, "nearby"], [T, "whole text"]]) {
    make("button", $("#span"), { value, textContent: name, onclick() { state.span = value; paint(); } });
  }
  for (const name in COLOURS) make("button", $("#by"), { textContent: name, onclick() { state.by = name; paint(); } });
  $("#theme").onclick = toggleTheme;
  DATA.models.forEach(build);
  state.by = Object.keys(COLOURS).find(name => name === asked.get("by")) ?? state.by;
  state.span = asked.get("span") == T ? T : Math.min(T, NEAR);
  state.query = whole(asked.get("q"), T) ?? state.query;
  state.heads = DATA.models.map(({ heads }, n) =>
      whole((asked.get("heads") ?? "").split(",")[n], heads.length) ?? farthest(heads));
  state.key = whole(asked.get("k"), T) ?? Math.max(0, state.query - 12);
  paint();
  show(state.query);
  addEventListener("resize", () => paint(["tracks"]));
  addEventListener("keydown", ({ key }) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (step) { choose(state.query + step); show(state.query); }
    if (key === "t") toggleTheme();
  });
  await paintMaps();
}
start();
