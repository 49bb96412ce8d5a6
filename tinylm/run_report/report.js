"use strict";
// Draws the report from the JSON block. Every string of the data becomes a text node or the value of a harmless attribute.
(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const runs = report.runs;
  const main = document.getElementById("report");
  const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3]];
  const TABLE_ROWS = 60;

  // ---- State that a reload keeps: choices by name, and the scroll position.
  const KEY = "tinylm report " + location.pathname;
  let state = {};
  try { state = JSON.parse(sessionStorage.getItem(KEY)) || {}; } catch { /* storage is switched off */ }
  function keep(name, value) {
    state[name] = value;
    try { sessionStorage.setItem(KEY, JSON.stringify(state)); } catch { /* the choice lasts until the next reload */ }
  }

  // ---- Elements and numbers
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") node.addEventListener(name, value);
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child != null));
    return node;
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (index) => css(`--run${index % 8}`);

  function short(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return +(value / 1e9).toPrecision(4) + " G";
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + " M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(4) + " k";
    return size > 0 && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(4));
  }
  const whole = (value) => (value == null ? "–" : value.toLocaleString("en"));

  const fixed = (value) => (value == null ? "–" : value.toFixed(4));

  function duration(seconds) {
    if (seconds == null) return "–";
    const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
    return h ? `${h}h ${m}m` : m ? `${m}m ${Math.floor(s)}s` : `${+s.toFixed(1)}s`;
  }

  function visible(text) { // a token as it is quoted
    return text === "" ? "(nothing)" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣");
  }

  function table(headings, rows, attributes = {}) {
    const cell = (value, i) => {
      const node = value instanceof Node && value.tagName === "TD" ? value : el("td", {}, value);
      node.dataset.name = headings[i + 1]; // shown by the style of stacked tables
      return node;
    };
    return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": attributes.caption || "table" },
      el("table", { class: attributes.class },
        attributes.caption ? el("caption", {}, attributes.caption) : null,
        el("thead", {}, el("tr", {}, headings.map((heading) => el("th", { scope: "col" }, heading)))),
        el("tbody", {}, rows.map(([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, name), cells.map(cell))))));
  }

  const unbroken = (text) => el("td", { class: "unbroken" }, text);

  // A bar. fraction: its length as a part of the cell's width; interval: ends of an interval drawn on it, likewise.
  function bar(fraction, index = 0, interval = null) {
    const percent = (part) => `${100 * Math.max(0, Math.min(1, part || 0))}%`;
    const node = el("div", { class: "bar" });
    node.style.width = percent(fraction);
    node.style.background = `var(--run${index % 8})`;
    const whisker = interval && interval[1] > interval[0] && el("div", { class: "whisker" });
    if (whisker) {
      whisker.style.left = percent(interval[0]);
      whisker.style.width = percent(interval[1] - interval[0]);
    }
    return el("td", { class: "bars" }, el("div", { class: "track" }, node, whisker || null));
  }

  function section(id, title, ...content) {
    if (!content.flat().some(Boolean)) return;
    main.append(el("section", { id, "aria-label": title }, el("h2", {}, title), ...content.flat()));
    navigation.append(el("a", { href: `#${id}` }, title));
  }

  // A section about one run at a time, with a menu of the runs for which `has` is true.
  function perRun(id, title, has, draw, note) {
    const able = runs.filter(has);
    if (!able.length) return;
    const body = el("div");
    const show = (name) => {
      const run = able.find((other) => other.name === name) || able[0];
      keep(id, run.name);
      body.replaceChildren(...[draw(run)].flat());
    };
    const menu = el("select", { change: (event) => show(event.target.value) }, able.map((run) => el("option", {}, run.name)));
    menu.value = able.some((run) => run.name === state[id]) ? state[id] : able[0].name;
    section(id, title, note ? el("p", { class: "faint" }, note) : null,
      able.length > 1 ? el("div", { class: "controls" }, el("label", {}, "Run ", menu)) : null, body);
    show(menu.value);
  }

  // ---- Plots
  const AXES = { step: ["step", short], seconds: ["time", duration], tokens: ["tokens", short] };
  const drawn = new Set();

  // series: {label, stroke, dash, width, points, x, y}; stroke is a function, since the colours change with the theme.
  function plot(title, axis, series, { log = false } = {}) {
    series = series.map((one) => {
      const pairs = one.x.map((x, i) => [x, one.y[i]]).filter(([x, y]) => x != null && y != null && (!log || y > 0));
      pairs.sort((a, b) => a[0] - b[0]);
      return { ...one, pairs };
    }).filter((one) => one.pairs.length);
    const [axisName, format] = AXES[axis];
    const drawing = el("div", { class: "drawing", tabindex: 0, role: "img",
      "aria-label": `${title} by ${axisName}; arrow keys move along the curve, and a table follows` });
    const all = series.flatMap((one) => one.pairs.map((pair) => pair[1]));
    log = log && Math.max(...all) > 10 * Math.min(...all);
    const values = series.map(() => el("span"));
    const at = el("li", { "aria-live": "polite" });
    const legend = el("ul", { class: "legend" }, at, series.map((one, i) => {
      const swatch = el("span", { class: "swatch" });
      swatch.style.borderTopColor = one.css;
      swatch.style.borderTopStyle = one.dash.length ? "dashed" : "solid";
      swatch.style.borderTopWidth = `${one.width + 1}px`;
      return el("li", {}, swatch, one.label, values[i]);
    }));
    const box = el("div", { class: "plot" }, el("h3", {}, title), drawing, legend);
    if (!series.length) {
      drawing.replaceWith(el("p", { class: "faint" }, `No values by ${axisName}.`));
      return box;
    }
    const data = uPlot.join(series.map((one) => [one.pairs.map((p) => p[0]), one.pairs.map((p) => p[1])]));
    const nearest = (i, index) => { // the last value of the series at or before the index
      while (index > 0 && data[i + 1][index] == null) index--;
      return data[i + 1][index];
    };
    const showAt = (index) => {
      at.textContent = index == null ? "" : `${axisName} ${format(data[0][index])}:`;
      values.forEach((node, i) => { node.textContent = index == null ? "" : short(nearest(i, index)); });
    };
    const options = () => ({
      width: Math.max(240, drawing.clientWidth), height: 260, legend: { show: false }, padding: [10, 14, 0, 0],
      cursor: { y: false, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      axes: [0, 1].map((i) => ({
        stroke: () => css("--text"), grid: { stroke: () => css("--line"), width: 0.5 }, ticks: { stroke: () => css("--line"), width: 0.5 },
        font: "12px system-ui, sans-serif", size: i ? 58 : 34, space: i ? 34 : 70,
        values: (u, splits) => splits.map((v) => (v == null ? "" : (i ? short : format)(v))),
      })),
      series: [{}, ...series.map((one) => ({ stroke: one.stroke, width: one.width, dash: one.dash, spanGaps: true,
        points: { show: one.points, size: 6, fill: one.stroke } }))],
      hooks: { setCursor: [(u) => showAt(u.cursor.idx)] },
    });
    let chart = null;
    const draw = () => {
      if (!chart) chart = new uPlot(options(), data, drawing);
      else chart.setSize({ width: Math.max(240, drawing.clientWidth), height: 260 });
    };
    drawing.addEventListener("keydown", (event) => {
      const last = data[0].length - 1;
      const jump = event.shiftKey ? Math.max(1, Math.round(last / 10)) : 1;
      const now = chart.cursor.idx ?? -1;
      const next = { ArrowRight: now + jump, ArrowLeft: now - jump, Home: 0, End: last }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      const index = Math.max(0, Math.min(last, next));
      chart.setCursor({ left: chart.valToPos(data[0][index], "x"), top: 0 });
      showAt(index);
    });
    const entry = { draw, redraw: () => chart && chart.redraw(false), drawing };
    drawn.add(entry);
    box.removePlot = () => { sizes.unobserve(drawing); drawn.delete(entry); if (chart) chart.destroy(); };
    requestAnimationFrame(() => { if (drawing.isConnected) { draw(); sizes.observe(drawing); } });
    const rows = () => {
      const every = Math.ceil(data[0].length / TABLE_ROWS);
      return data[0].map((x, i) => [format(x), ...series.map((_, j) => short(data[j + 1][i]))])
        .filter((_, i) => i % every === 0 || i === data[0].length - 1);
    };
    box.append(lazyDetails("Table", () => table([axisName, ...series.map((one) => one.label)], rows(), { caption: title })));
    return box;
  }
  const sizes = new ResizeObserver((entries) => {
    for (const one of drawn) if (entries.some((entry) => entry.target === one.drawing)) one.draw();
  });

  function lazyDetails(title, make) {
    const node = el("details", {}, el("summary", {}, title));
    node.addEventListener("toggle", () => { if (node.open && node.children.length === 1) node.append(make()); });
    return node;
  }

  function replot(parent, plots) {
    for (const old of parent.children) if (old.removePlot) old.removePlot();
    parent.replaceChildren(...plots);
  }

  const redraw = () => { for (const one of drawn) one.redraw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { redraw(); repaint.forEach((paint) => paint()); });
  const repaint = new Set();
  function printing(on) {
    document.documentElement.classList.toggle("print", on);
    for (const one of drawn) one.draw();
    redraw();
  }
  matchMedia("print").addEventListener("change", (event) => printing(event.matches));
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));

  // ---- Head of the page
  document.title = `${runs.map((run) => run.name).join(", ").slice(0, 80)} – tinylm report`;
  const navigation = el("nav", { "aria-label": "Sections" });
  main.append(el("header", {},
    el("h1", {}, runs.length === 1 ? runs[0].name : `${runs.length} runs`),
    el("p", { class: "faint" }, `tinylm ${report.version}, ${report.created.replace("T", " ").replace("+00:00", " UTC")}`),
    liveNotice(), navigation));

  function liveNotice() {
    if (!report.refresh) return null;
    const paused = el("input", { type: "checkbox", change: (event) => keep("paused", event.target.checked) });
    paused.checked = Boolean(state.paused);
    setInterval(() => {
      if (paused.checked) return;
      keep("scroll", scrollY);
      location.reload();
    }, 1000 * report.refresh);
    return el("p", { class: "live" }, `Training is running: this page reloads every ${report.refresh} seconds. `, el("label", {}, paused, " Pause"));
  }

  // ---- Overview: the results first, of the best weights on the validation text
  const best = (name) => (run) => run.curves.best && run.curves.best[name];
  const overview = [
    ["bits per byte", (run) => run.val_bits_per_byte, fixed], ["accuracy", best("accuracy"), fixed], ["margin", best("margin"), fixed],
    ["validation loss", (run) => run.val_loss, fixed], ["at step", (run) => run.best_step, whole], ["steps", (run) => run.step, whole],
    ["time", (run) => run.seconds, duration], ["parameters", (run) => run.parameters, whole], ["kind", (run) => run.kind, unbroken],
  ].filter(([, value]) => runs.some((run) => value(run) != null));
  section("overview", "Overview",
    table(["run", ...overview.map(([title]) => title)], runs.map((run, i) => {
      const swatch = el("span", { class: "swatch" });
      swatch.style.borderTopColor = `var(--run${i % 8})`;
      return [el("span", {}, swatch, " ", run.name), ...overview.map(([, value, shownAs]) => shownAs(value(run)))];
    }), { class: "stacked" }),
    el("p", { class: "faint" }, `Of the best weights on the validation text; of a run that was stopped before its first evaluation, of the last ones on a part of it. The validation loss is in ${[...new Set(runs.map((run) => run.loss_unit))].join(" or ")}.${
      runs.some((run) => run.val_bits_per_byte != null) ? " Bits per byte of models with different tokenizers can be compared, losses in nats per token cannot." : ""}`),
    runs.flatMap((run) => run.problems.map((text) => el("p", { class: "problem" }, `${run.name}: ${text}`))),
    report.models ? null : el("p", { class: "faint" }, "Attention, loss per token, evaluation and memorisation need the model: write the report with tinylm report."));

  // ---- Curves
  (function curves() {
    const able = runs.filter((run) => run.curves.train && (run.curves.train.step.length || run.curves.val.step.length));
    if (!able.length) return;
    const plots = el("div", { class: "plots" });
    const hidden = new Set(state.hidden || []);
    let axis = AXES[state.axis] ? state.axis : "step";
    const one = (run, part, name, more) => {
      const index = runs.indexOf(run);
      const columns = run.curves[part] || {};
      return { stroke: () => colour(index), css: `var(--run${index % 8})`, dash: DASHES[index % 4], width: 1.5, points: false, label: run.name,
        x: columns[axis] || [], y: columns[axis] ? columns[name] || [] : [], ...more };
    };
    const draw = () => {
      const shown = able.filter((run) => !hidden.has(run.name));
      const all = (name) => shown.map((run) => one(run, "train", name));
      const byte = shown.filter((run) => run.curves.val.val_bits_per_byte);
      const list = byte.length ? [plot("Validation loss (bits per byte)", axis, byte.map((run) =>
        one(run, "val", "val_bits_per_byte", { width: 2.5, points: run.curves.val.step.length < 80 })))] : [];
      list.push(plot(`Loss (${[...new Set(shown.map((run) => run.loss_unit))].join(", ")})`, axis, shown.flatMap((run) => [
        one(run, "train", "loss", { width: 1, label: `${run.name} (training)` }),
        one(run, "val", "val_loss", { width: 2.5, points: run.curves.val.step.length < 80, label: `${run.name} (validation)` }),
      ])), plot("Learning rate", axis, all("lr")), plot("Gradient norm, before clipping", axis, all("grad_norm"), { log: true }),
      plot("Training tokens per second", axis, all("tokens_per_second")));
      const metrics = { accuracy: "Accuracy", margin: "Margin (nats)", router_entropy: "Router entropy (nats)" };
      for (const [name, title] of Object.entries(metrics)) {
        const able = shown.filter((run) => run.curves.train[name]);
        if (able.length) list.push(plot(title, axis, able.flatMap((run) => [
          one(run, "train", name, { width: 1, label: `${run.name} (training)` }),
          ...(run.curves.val[`val_${name}`] ? [one(run, "val", `val_${name}`, { width: 2.5, label: `${run.name} (validation)` })] : []),
        ])));
      }
      replot(plots, list);
    };
    const axes = el("fieldset", { class: "controls" }, el("legend", {}, "Against"), Object.entries(AXES)
      .filter(([name]) => able.some((run) => run.curves.train[name] || run.curves.val[name])).map(([name, [label]]) => {
        const input = el("input", { type: "radio", name: "axis", value: name, change: () => { keep("axis", axis = name); draw(); } });
        input.checked = name === axis;
        return el("label", {}, input, label);
      }));
    const choices = able.length < 2 ? null : el("fieldset", { class: "controls" }, el("legend", {}, "Runs"), able.map((run) => {
      const input = el("input", { type: "checkbox", change: () => {
        if (input.checked) hidden.delete(run.name); else hidden.add(run.name);
        keep("hidden", [...hidden]);
        draw();
      } });
      input.checked = !hidden.has(run.name);
      return el("label", {}, input, run.name);
    }));
    section("curves", "Curves", axes, choices, el("p", { class: "faint zooming" }, "Drag over a plot to zoom into it; a double click shows all of it again."), plots);
    draw();
  })();

  // ---- Plan
  section("plan", "Plan and result", runs.filter((run) => run.plan.length).map((run) =>
    table([runs.length > 1 ? run.name : "", "planned", "happened"], run.plan, { caption: runs.length > 1 ? run.name : undefined })));

  // ---- Samples
  perRun("samples", "Samples by step", (run) => run.samples.length, (run) => {
    const samples = run.samples;
    const text = el("div", { class: "text sample", tabindex: 0 });
    const label = el("output");
    const slider = el("input", { type: "range", min: 0, max: samples.length - 1, "aria-label": "Sample", input: () => show(+slider.value) });
    const show = (index) => {
      index = Math.max(0, Math.min(samples.length - 1, index));
      const sample = samples[index];
      slider.value = index;
      const loss = sample.val_loss == null ? "" : `, validation loss ${sample.val_loss.toFixed(3)}`;
      label.textContent = `step ${whole(sample.step)}${loss} (${index + 1} of ${samples.length})`;
      slider.setAttribute("aria-valuetext", label.textContent);
      text.textContent = sample.text;
      keep("sample", index === samples.length - 1 ? null : index);
    };
    const turn = (by) => () => show(+slider.value + by);
    show(state.sample ?? samples.length - 1);
    return [el("div", { class: "controls" }, el("button", { type: "button", click: turn(-1), "aria-label": "Earlier sample" }, "‹"), slider,
      el("button", { type: "button", click: turn(1), "aria-label": "Later sample" }, "›"), label), text];
  });

  // ---- Loss of each token
  const PASSAGES = {
    next: "Each token of a validation text is coloured by its loss, given the tokens before it.",
    masked: "Underlined tokens of a validation text were masked, and are coloured by the loss of the prediction.",
    target: "Each token of a validation target is coloured by its loss, given the source and the target tokens before it.",
  };
  perRun("passage", "Loss per token", (run) => run.passage, (run) => {
    const { tokens, kind, source } = run.passage;
    const losses = tokens.filter((token) => token.loss != null).map((token) => token.loss);
    const most = Math.max(4, ...losses);
    const readout = el("div", { class: "readout", "aria-live": "polite" }, "Point at a token, or move through the text with the arrow keys.");
    let chosen = -1;
    const nodes = tokens.map((token, i) => {
      const node = el("span", { class: kind === "masked" && token.loss != null ? "token masked" : "token", mouseenter: () => choose(i), click: () => choose(i) },
        token.text.replace(/\n/g, "⏎\n"));
      if (token.loss != null) node.style.background = `rgba(var(--heat), ${(0.65 * Math.min(1, token.loss / most)).toFixed(3)})`;
      return node;
    });
    const choose = (index) => {
      if (nodes[chosen]) nodes[chosen].classList.remove("chosen");
      chosen = Math.max(0, Math.min(tokens.length - 1, index));
      nodes[chosen].classList.add("chosen");
      const token = tokens[chosen];
      readout.replaceChildren(el("div", {}, el("code", {}, visible(token.text)), token.loss == null ? " is not predicted" :
        ` has loss ${token.loss.toFixed(3)} (probability ${short(Math.exp(-token.loss))}). Likeliest:`));
      if (token.likeliest) readout.append(...token.likeliest.map(([text, p]) => el("div", {}, `${(100 * p).toFixed(1)} % `, el("code", {}, visible(text)))));
    };
    const text = el("div", { class: "text", tabindex: 0, role: "group", "aria-label": "Passage; arrow keys choose a token",
      focus: () => { if (chosen < 0) choose(0); },
      keydown: (event) => {
        const next = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, ArrowDown: chosen + 10, ArrowUp: chosen - 10, Home: 0, End: tokens.length - 1 }[event.key];
        if (next === undefined) return;
        event.preventDefault();
        choose(next);
      } }, nodes);
    const mean = losses.reduce((sum, loss) => sum + loss, 0) / Math.max(1, losses.length);
    return [el("p", { class: "faint" }, `${PASSAGES[kind]} Mean: ${mean.toFixed(3)} nats per token.`),
      source ? el("p", {}, "Source: ", el("span", { class: "quoted" }, source)) : null, text, readout,
      lazyDetails("Table", () => table(["token", "loss", "likeliest"], tokens.map((token) => [visible(token.text),
        token.loss == null ? "–" : token.loss.toFixed(3), (token.likeliest || []).map(([other, p]) => `${visible(other)} ${(100 * p).toFixed(0)} %`).join(", ")])))
    ].filter(Boolean);
  });

  // ---- Attention
  perRun("attention", "Attention", (run) => run.attention && run.attention.length, (run) => {
    const heads = el("div", { class: "heads", role: "group", "aria-label": "Heads" });
    const map = el("canvas", { class: "map", tabindex: 0, role: "img" });
    const readout = el("p", { class: "faint", "aria-live": "polite" });
    const details = el("div");
    const kinds = el("select", { change: () => kindChanged() }, run.attention.map((one) => el("option", {}, one.kind)));
    const layers = el("select", { change: () => layerChanged() });
    let now, bytes, count, head, cell;
    const at = (h, t, s) => bytes[(h * now.rows.length + t) * now.columns.length + s];

    function kindChanged() {
      now = run.attention[kinds.selectedIndex];
      layers.replaceChildren(...now.layers.map((_, i) => el("option", {}, `layer ${i}`)));
      layerChanged();
    }
    function layerChanged() {
      const layer = now.layers[layers.selectedIndex];
      bytes = Uint8Array.from(atob(layer.weights), (c) => c.charCodeAt(0));
      count = layer.heads;
      heads.replaceChildren(...Array.from({ length: count }, (_, h) => {
        const canvas = el("canvas", { width: now.columns.length, height: now.rows.length });
        return el("button", { type: "button", "aria-pressed": "false", click: () => headChanged(h) }, canvas, `head ${h}`);
      }));
      headChanged(Math.min(head || 0, count - 1));
      paint();
    }
    function headChanged(h) {
      head = h;
      cell = null;
      [...heads.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === h)));
      map.setAttribute("aria-label", `Attention of head ${h}, ${now.kind}; arrow keys choose a cell, and a table follows`);
      details.replaceChildren(lazyDetails("Table", () => table(["", ...now.columns.map(visible)],
        now.rows.map((row, t) => [visible(row), ...now.columns.map((_, s) => (at(h, t, s) / 255).toFixed(2))]))));
      readout.textContent = "Point at a cell, or move with the arrow keys. Rows are queries, columns are keys.";
      paintMap();
    }
    function paint() {
      [...heads.querySelectorAll("canvas")].forEach((canvas, h) => {
        const context = canvas.getContext("2d");
        const image = context.createImageData(canvas.width, canvas.height);
        for (let i = 0; i < canvas.width * canvas.height; i++) image.data.set(shade(bytes[h * canvas.width * canvas.height + i]), 4 * i);
        context.putImageData(image, 0, 0);
      });
      paintMap();
    }
    const light = () => css("--ground") === "#fff";
    function shade(value) { // the square root shows small weights
      const part = Math.sqrt(value / 255);
      const [from, to] = light() ? [[255, 255, 255], [11, 62, 140]] : [[20, 22, 26], [150, 205, 255]];
      return [...from.map((start, i) => Math.round(start + part * (to[i] - start))), 255];
    }
    const SIZE = 15, FONT = "11px ui-monospace, monospace";
    let ROOM = 92; // for labels
    function paintMap() {
      const measure = map.getContext("2d");
      measure.font = FONT;
      ROOM = Math.min(92, 8 + Math.max(...[...now.rows, ...now.columns].map((text) => measure.measureText(visible(text)).width)));
      const [width, height] = [ROOM + SIZE * now.columns.length, ROOM + SIZE * now.rows.length];
      const ratio = devicePixelRatio || 1;
      map.width = width * ratio; map.height = height * ratio;
      map.style.width = `${width}px`; map.style.height = `${height}px`;
      const context = map.getContext("2d");
      context.scale(ratio, ratio);
      context.font = FONT;
      context.fillStyle = css("--text");
      context.textBaseline = "middle";
      context.textAlign = "right";
      now.rows.forEach((text, t) => context.fillText(visible(text), ROOM - 4, ROOM + SIZE * (t + 0.5), ROOM - 6));
      context.textAlign = "left";
      now.columns.forEach((text, s) => {
        context.save();
        context.translate(ROOM + SIZE * (s + 0.5), ROOM - 4);
        context.rotate(-Math.PI / 2);
        context.fillText(visible(text), 0, 0, ROOM - 6);
        context.restore();
      });
      for (let t = 0; t < now.rows.length; t++) {
        for (let s = 0; s < now.columns.length; s++) {
          context.fillStyle = `rgb(${shade(at(head, t, s)).slice(0, 3)})`;
          context.fillRect(ROOM + SIZE * s, ROOM + SIZE * t, SIZE - 1, SIZE - 1);
        }
      }
      if (cell) {
        context.strokeStyle = css("--run1");
        context.lineWidth = 2;
        context.strokeRect(ROOM + SIZE * cell[1] - 1, ROOM + SIZE * cell[0] - 1, SIZE, SIZE);
      }
    }
    function choose(t, s) {
      cell = [Math.max(0, Math.min(now.rows.length - 1, t)), Math.max(0, Math.min(now.columns.length - 1, s))];
      readout.replaceChildren(el("code", {}, visible(now.rows[cell[0]])), ` (${cell[0]}) attends to `, el("code", {}, visible(now.columns[cell[1]])),
        ` (${cell[1]}): ${(at(head, ...cell) / 255).toFixed(3)}`);
      paintMap();
    }
    map.addEventListener("mousemove", (event) => {
      const [s, t] = [event.offsetX, event.offsetY].map((place) => Math.floor((place - ROOM) / SIZE));
      if (s >= 0 && t >= 0) choose(t, s);
    });
    map.addEventListener("keydown", (event) => {
      const [t, s] = cell || [0, -1];
      const next = { ArrowRight: [t, s + 1], ArrowLeft: [t, s - 1], ArrowDown: [t + 1, Math.max(0, s)], ArrowUp: [t - 1, Math.max(0, s)] }[event.key];
      if (!next) return;
      event.preventDefault();
      choose(...next);
    });
    repaint.clear();
    repaint.add(paint);
    kindChanged();
    return [el("div", { class: "controls" }, el("label", {}, "Kind ", kinds), el("label", {}, "Layer ", layers)), heads, readout,
      el("div", { class: "scroll" }, map), details];
  }, "Darker cells have more weight (brighter ones on a dark page). Each row of a map sums to 1. In a cross-attention, rows are target tokens.");

  // ---- Experts, updates, parameters, evaluation
  perRun("experts", "Tokens per expert", (run) => run.curves.experts, (run) => {
    const shares = run.curves.experts;
    const most = Math.max(...shares.flat().map((share) => share || 0), 1e-9);
    const cells = (row) => row.map((share) => {
      const node = el("td", {}, share == null ? "–" : `${(100 * share).toFixed(1)} %`);
      node.style.background = `rgba(var(--heat), ${(0.6 * (share || 0)) / most})`;
      return node;
    });
    return table(["layer", ...(shares[0] || []).map((_, i) => `expert ${i}`)], shares.map((row, i) => [String(i), ...cells(row)]), { class: "cells" });
  }, "The share of each expert in the tokens of each layer, at the last logged step.");

  perRun("updates", "Updates of the adapter", (run) => run.updates, (run) => {
    const value = (update) => update.relative ?? update.norm;
    const most = Math.max(...run.updates.map((update) => value(update) || 0), 1e-30);
    return table(["layer", "norm", "relative to the base", ""],
      run.updates.map((update) => [update.layer, short(update.norm), short(update.relative), bar(value(update) / most)]), { class: "wide" });
  }, "Frobenius norm of the update of each layer: s B A of LoRA, the product of both matrices of a bottleneck.");

  const TITLES = { loss: "nats per token", accuracy: "accuracy", macro_f1: "macro F1", margin: "margin in nats", exact_match: "exact match rate", bits_per_byte: "bits per byte", bleu: "BLEU",
    chrf: "chrF", tokens: "tokens scored", characters: "characters scored", bytes: "bytes scored", pairs: "pairs" };
  const COUNTS = new Set(["tokens", "characters", "bytes", "pairs", "texts"]);
  const titleOf = (name) => TITLES[name] || name.replace(/_/g, " ");

  (function evaluation() {
    const able = runs.filter((run) => run.evaluation);
    if (!able.length) return;
    const names = [...new Set(able.flatMap((run) => Object.keys(run.evaluation.metrics)))].filter((name) => !/_(low|high)$/.test(name));
    const row = (name, value) => [name, ...able.map((run) => value(run.evaluation.metrics))];
    const shownAs = (name) => (name === "loss" ? fixed : COUNTS.has(name) ? whole : short);
    const interval = (name) => row("95 % interval", ({ [`${name}_low`]: low, [`${name}_high`]: high }) => unbroken(low == null ? "–" : `${fixed(low)} to ${fixed(high)}`));
    const unit = able.every((run) => run.evaluation.metrics.texts) ? "nats per text" : titleOf("loss");
    const rows = names.flatMap((name) => [row(name === "loss" ? unit : titleOf(name), (metrics) => shownAs(name)(metrics[name])),
      ...(able.some((run) => run.evaluation.metrics[`${name}_low`] != null) ? [interval(name)] : [])]);
    const content = [table(["", ...able.map((run) => run.name)], rows)];
    for (const compared of ["bits_per_byte", "bleu"]) {
      const beside = able.filter((run) => run.evaluation.compared === compared && Object.keys(run.evaluation.baselines).length);
      // Runs on the same text have nearly the same baselines: their excerpts differ by a few bytes. Equal ones are shown once.
      const bars = beside.map((run) => [run.name, run.evaluation.metrics[compared], runs.indexOf(run)]);
      for (const run of beside) {
        for (const [name, value] of Object.entries(run.evaluation.baselines)) {
          const same = beside.filter((other) => Math.abs(other.evaluation.baselines[name] - value) <= 0.002 * value);
          if (same[0] === run) bars.push([same.length < beside.length ? `${name} (${same.map((one) => one.name).join(", ")})` : name, value, 7]);
        }
      }
      const shown = bars.filter((one) => one[1] != null);
      const most = Math.max(...shown.map((one) => one[1]), 1e-9);
      if (beside.length) content.push(el("h3", {}, `${titleOf(compared).replace(/^b/, "B")} beside baselines`),
        table(["", titleOf(compared), ""], shown.map(([name, value, index]) => [name, short(value), bar(value / most, index)]), { class: "wide" }));
    }
    for (const run of able.filter((run) => run.evaluation.confusion)) {
      const { labels, confusion } = run.evaluation;
      content.push(el("h3", {}, `Labels given by ${run.name}`),
        table(["label, given:", ...labels], confusion.map((row, index) => [labels[index], ...row.map(whole)]), { class: "wide" }));
    }
    for (const run of able.filter((run) => run.evaluation.mistakes)) {
      content.push(el("h3", {}, `Most frequent mistakes of ${run.name}`), table(["label", "given", "texts"], run.evaluation.mistakes.map(([count, label, given]) => [label, given, whole(count)])));
    }
    section("evaluation", "Evaluation", el("p", { class: "faint" }, `On the beginning of the validation text: at most 50,000 bytes, 200 pairs, or 50,000 tokens of conversations.
      Lower is better, except for accuracy, macro F1, exact match rate, BLEU and chrF.`), content);
  })();

  // ---- Memorisation
  const CONTROL = "held-out text";
  (function memorisation() {
    const able = runs.filter((run) => run.memorisation);
    if (!able.length) return;
    const measured = able.filter((run) => run.memorisation.sources);
    const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(1)} %`);
    const several = runs.length > 1;
    const content = able.filter((run) => run.memorisation.left_out).map((run) => el("p", {},
      `${several ? `${run.name}: not` : "Not"} measured, because ${run.memorisation.left_out}: tinylm report --memorisation measures it.`));
    if (measured.length) {
      const { min_match: k, sample_length: length, prefix_length: prefix } = measured[0].memorisation;
      const kinds = [...new Set(measured.flatMap((run) => run.memorisation.sources.map((source) => source.source)))];
      const found = [];
      for (const kind of kinds) {
        const all = measured.flatMap((run) => run.memorisation.sources.filter((source) => source.source === kind).map((source) => ({ ...source, run })));
        const figures = new Set(all.map((source) => [source.copied, source.low, source.high, source.longest, source.samples].join()));
        // Runs on the same text have the same held-out text, which is shown once.
        const same = several && kind === CONTROL && all.length > 1 && figures.size === 1;
        for (const source of same ? all.slice(0, 1) : all) {
          const title = kind === CONTROL ? `${kind} (control)` : kind;
          found.push({ ...source, title: several && !same ? `${title}, ${source.run.name}` : title, index: same ? 7 : runs.indexOf(source.run) });
        }
      }
      const most = Math.max(...found.map((source) => source.high ?? source.copied ?? 0), 1e-9);
      const rows = found.map((source) => [source.title, percent(source.copied),
        unbroken(source.low == null ? "–" : `${(100 * source.low).toFixed(1)} to ${percent(source.high)}`),
        bar(source.copied / most, source.index, source.low == null ? null : [source.low / most, source.high / most]),
        whole(source.longest), whole(source.samples)]);
      content.push(el("p", { class: "faint" }, `The share of characters in verbatim matches of at least ${k} characters with the training text, of texts of
        at most ${length} characters. Continuations follow ${prefix} characters of the training text or of held-out text. The control is the true continuation in
        the held-out text: a model that copies more than the control repeats its training text. Lines on the bars are 95 % intervals.`),
      table(["text", "copied", "95 % interval", "", "longest match", "texts"], rows, { class: "wide" }));
      for (const run of measured) {
        const matches = run.memorisation.sources.flatMap((source) => source.matches.map((match) => [source.source, match]));
        matches.sort((one, other) => other[1].characters - one[1].characters);
        if (!matches.length) continue;
        const show = () => table(["match", "characters", "in"], matches.map(([source, match]) => [
          el("span", { class: "quoted" }, match.text.replace(/\n/g, "⏎").replace(/ {4,}/g, (run) => ` ␣×${run.length} `), [...match.text].length < match.characters ? "…" : ""),
          whole(match.characters), source]), { class: "matches" });
        content.push(several ? lazyDetails(`Longest matches of ${run.name}`, show) : [el("h3", {}, "Longest matches"), show()]);
      }
    }
    section("memorisation", "Memorisation", ...content);
  })();

  section("parameters", "Parameters by part", (() => {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.parts)))];
    if (!names.length) return null;
    const most = Math.max(...runs.map((run) => run.parts.total || 0), 1);
    if (runs.length > 1) return table(["", ...runs.map((run) => run.name)], names.map((name) => [name, ...runs.map((run) => whole(run.parts[name]))]));
    return table(["", "parameters", ""], names.map((name) => [name, whole(runs[0].parts[name]), bar(runs[0].parts[name] / most)]), { class: "wide" });
  })());

  // ---- Settings
  (function settings() {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
    const differ = (name) => new Set(runs.map((run) => run.settings[name])).size > 1;
    const body = el("div");
    const only = el("input", { type: "checkbox", change: () => show() });
    only.checked = runs.length > 1 && state.only !== false;
    const show = () => {
      keep("only", only.checked);
      const rows = names.filter((name) => !only.checked || differ(name));
      body.replaceChildren(rows.length ? table(["setting", ...runs.map((run) => run.name)], rows.map((name) => [name, ...runs.map((run) => run.settings[name] ?? "–")]))
        : el("p", {}, "The runs have equal settings."));
    };
    section("settings", "Settings", runs.length > 1 ? el("div", { class: "controls" }, el("label", {}, only, "Only differences")) : null, body);
    show();
  })();

  if (report.refresh && state.scroll) requestAnimationFrame(() => requestAnimationFrame(() => scrollTo(0, state.scroll)));
})();
