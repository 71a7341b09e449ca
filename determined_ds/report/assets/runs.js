// The curves of the page: every picture shows the same part of the same axis.
(() => {
  const HEIGHT = 240, MOST_TOLD = 12, NUM_COLOURS = 10;
  const data = JSON.parse(document.getElementById("data").textContent);
  const figures = () => [...document.querySelectorAll("figure[data-chart]")];
  const plots = new Map();   // figure -> uPlot
  const visible = new Set();
  const hidden = new Set();  // labels of runs
  let axis = "batch", logarithmic = false, smooth = false, zoom = null;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // ---------------------------------------------------------------------------------------- numbers

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
  function number(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e12)) return value.toExponential(2);
    return size >= 1e5 ? short.format(value) : String(+value.toPrecision(6));
  }
  function duration(seconds) {
    if (seconds < 60) return +seconds.toFixed(1) + " s";
    if (seconds < 3600) return Math.floor(seconds / 60) + ":" + String(Math.round(seconds % 60)).padStart(2, "0") + " min";
    return Math.floor(seconds / 3600) + ":" + String(Math.floor(seconds / 60) % 60).padStart(2, "0") + " h";
  }
  const place = (x) => axis === "time" ? duration(x) : axis === "samples" ? short.format(x) + " samples" : "batch " + whole.format(x);
  const SECONDS = [1, 2, 5, 10, 15, 30].flatMap((n) => [n, 60 * n]).concat([1, 2, 3, 6, 12, 24, 48, 120, 240, 480, 960].map((h) => 3600 * h));
  const TIMES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5].concat(SECONDS).sort((a, b) => a - b);
  const COUNTS = Array.from({ length: 45 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));

  // ------------------------------------------------------------------------------------------ data

  function across(run, curve) {
    if (axis === "time") return curve.t;
    const steps = curve.s;
    if (axis === "batch") return steps;
    return run.samples ? steps.map((step) => step * run.samples) : undefined;
  }
  // Where a batch is on the axis: in time, that of the last report before it.
  function whereIs(run, step) {
    if (axis !== "time") return axis === "batch" ? step : run.samples ? step * run.samples : null;
    const curves = Object.values(run.curves).sort((a, b) => b.s.length - a.s.length);
    if (!curves.length || !curves[0].t) return null;
    const at = curves[0].s.findLastIndex((each) => each <= step);
    return at < 0 ? 0 : curves[0].t[at];
  }

  // The means of at most 150 equal parts of a curve, each at its last point; of a short curve, the curve.
  function smoothed(curve) {
    const count = curve.v.length, parts = Math.min(150, Math.floor(count / 5));
    if (parts < 4) return curve;
    const means = { s: [], v: [], ...(curve.t && { t: [] }) };
    for (let part = 0; part < parts; part++) {
      const from = Math.floor(part * count / parts), to = Math.floor((part + 1) * count / parts);
      const finite = curve.v.slice(from, to).filter((value) => typeof value === "number");
      means.s.push(curve.s[to - 1]);
      if (curve.t) means.t.push(curve.t[to - 1]);
      means.v.push(finite.length ? finite.reduce((sum, value) => sum + value / finite.length, 0) : "NaN");
    }
    return means;
  }

  // How the curves of a picture are drawn: validations as dots; several metrics of one run differ in colour, those of
  // several runs in dashes.
  const several = data.runs.length > 1;
  function stylesOf(chart) {
    let plain = 0;
    return chart.curves.map((name) => {
      const dots = name.startsWith("validation/"), place = dots ? 0 : plain++;
      return { name, dots, shift: several ? 0 : place, dash: place && several ? [3 + 3 * place, 4] : undefined };
    });
  }
  function addKey(figure) {
    const styles = stylesOf(data.charts[figure.dataset.chart]);
    for (const { name, dots, shift, dash } of styles.sort((a, b) => a.dots - b.dots)) {
      const colour = several ? "" : " k" + shift % NUM_COLOURS;
      const className = (dots ? "dots" : dash ? "dashed" : "line") + colour;
      figure.querySelector(".key").append(Object.assign(document.createElement("span"), { className, textContent: name }), " ");
    }
  }

  // The lines of a picture, each with its x and y; what is not finite is a gap, and remembered.
  function linesOf(chart) {
    const lines = [];
    for (const run of data.runs) {
      if (hidden.has(run.label)) continue;
      for (const { name, dots, shift, dash } of stylesOf(chart)) {
        const known = run.curves[name], curve = smooth && known && !dots ? smoothed(known) : known;
        const xs = curve && across(run, curve);
        if (!xs) continue;
        const odd = [];
        const ys = curve.v.map((value, i) => {
          const bad = typeof value !== "number";
          if (bad) odd.push([xs[i], value]);
          return bad || (logarithmic && value <= 0) ? null : value;
        });
        lines.push({ run, name, dots, dash, xs, ys, odd, colour: (run.colour + shift) % NUM_COLOURS });
      }
    }
    return lines;
  }

  // ---------------------------------------------------------------------------------------- drawing

  function options(figure, chart, lines, width) {
    const muted = colour("muted"), grid = colour("grid");
    const side = { stroke: muted, font: "12px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: grid, width: 1 } };
    const series = lines.map((line) => ({
      label: (several ? line.run.label + "  " : "") + line.name,
      stroke: colour("s" + line.colour),
      width: line.dots ? 1.2 : 1.6,
      dash: line.dash,
      spanGaps: false,
      points: line.dots || line.xs.length === 1 ? { show: true, size: line.xs.length > 60 ? 3 : 6, fill: colour("s" + line.colour) } : { show: false },
    }));
    return {
      width, height: HEIGHT, series: [{}, ...series],
      legend: { show: false },
      scales: { x: { time: false }, y: logarithmic ? { distr: 3 } : {} },
      axes: [
        { ...side, size: 30, incrs: axis === "time" ? TIMES : COUNTS, space: 70,
          values: (_, splits) => splits.map((x) => axis === "time" ? duration(x) : short.format(x)) },
        { ...side, size: 62, values: (_, splits) => splits.map((y) => y === null ? "" : number(y)) },
      ],
      cursor: {
        drag: { x: true, y: false, setScale: false },
        sync: { key: "runs", setSeries: false },
        points: { size: 6 },
        bind: { dblclick: () => () => { show(null); return null; } },
      },
      hooks: {
        draw: [(plot) => marks(plot, lines)],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const ends = [plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x"));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          show(ends);
        }],
        setCursor: [(plot) => tell(figure, plot, lines)],
      },
    };
  }

  function marks(plot, lines) {
    const context = plot.ctx, box = plot.bbox, ratio = devicePixelRatio;
    const inside = (x) => x !== null && x !== undefined && x >= plot.scales.x.min && x <= plot.scales.x.max;
    const at = (x) => plot.valToPos(x, "x", true);
    context.save();
    context.font = 11 * ratio + "px system-ui, sans-serif";
    context.textAlign = "center";
    for (const run of new Set(lines.map((line) => line.run))) {
      context.strokeStyle = context.fillStyle = colour(several ? "s" + run.colour : "muted");
      for (const mark of run.marks) {
        const x = whereIs(run, mark.step);
        if (!inside(x)) continue;
        context.setLineDash([4 * ratio, 4 * ratio]);
        context.beginPath();
        context.moveTo(at(x), box.top);
        context.lineTo(at(x), box.top + box.height);
        context.stroke();
        context.textAlign = at(x) < box.left + 30 * ratio ? "left" : at(x) > box.left + box.width - 30 * ratio ? "right" : "center";
        context.fillText(mark.text, at(x), box.top + 9 * ratio);
      }
      context.setLineDash([]);
      for (const checkpoint of run.checkpoints) {
        const x = whereIs(run, checkpoint), low = box.top + box.height;
        if (!inside(x)) continue;
        context.beginPath();
        context.moveTo(at(x), low - 7 * ratio);
        context.lineTo(at(x) - 4 * ratio, low);
        context.lineTo(at(x) + 4 * ratio, low);
        context.fill();
      }
    }
    context.textAlign = "center";
    context.font = "bold " + 14 * ratio + "px system-ui, sans-serif";
    for (const line of lines) {
      context.fillStyle = colour("s" + line.colour);
      for (const [x] of line.odd) if (inside(x)) context.fillText("×", at(x), box.top + 22 * ratio);
    }
    context.restore();
  }

  // What is under the cursor: of each line the point that is nearest to it.
  function tell(figure, plot, lines) {
    let tip = figure.querySelector(".tip");
    const { left, top } = plot.cursor;
    if (left === undefined || left < 0) {
      if (tip) tip.remove();
      return;
    }
    if (!figure.matches(":hover")) return;
    if (!tip) figure.querySelector(".plot").append(tip = Object.assign(document.createElement("div"), { className: "tip" }));
    const x = plot.posToVal(left, "x"), rows = [];
    const near = lines.map((line) => nearest(line.xs, x));
    const at = lines.map((line, i) => line.xs[near[i]]);
    const here = at.reduce((one, other) => (Math.abs(other - x) < Math.abs(one - x) ? other : one), Infinity);
    lines.forEach((line, i) => {
      const odd = line.odd.find(([where]) => where === at[i]), y = line.ys[near[i]];
      const value = odd ? odd[1] : y === null ? "≤ 0" : line.dots ? String(y) : number(y);
      const elsewhere = at[i] === here ? "" : "  (" + place(at[i]) + ")";
      rows.push([line, (several ? line.run.label + " " : "") + (line.dots ? "• " : "") + value + elsewhere]);
    });
    tip.replaceChildren(...[[null, place(here)], ...rows.slice(0, MOST_TOLD)].map(([line, text]) => {
      const row = document.createElement("div");
      if (line) {
        const dot = document.createElement("span");
        dot.className = "dot c" + line.colour;
        row.append(dot);
      }
      row.append(text);
      return row;
    }));
    if (rows.length > MOST_TOLD) tip.append(Object.assign(document.createElement("div"), { textContent: "and " + (rows.length - MOST_TOLD) + " more" }));
    const shift = plot.over.offsetLeft + left, room = plot.root.clientWidth - tip.offsetWidth;
    tip.style.left = Math.max(0, shift + 14 > room ? Math.min(room, shift - tip.offsetWidth - 14) : shift + 14) + "px";
    tip.style.top = Math.max(0, Math.min(top, HEIGHT - tip.offsetHeight)) + "px";
  }
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    if (high < 0) return -1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  function draw(figure) {
    const chart = data.charts[figure.dataset.chart], box = figure.querySelector(".plot");
    if (!chart) return;
    const lines = linesOf(chart).filter((line) => line.ys.some((y) => y !== null));
    const old = plots.get(figure);
    if (old) old.destroy();
    plots.delete(figure);
    box.replaceChildren();
    if (!lines.length) {
      box.append(Object.assign(document.createElement("p"), { className: "empty", textContent: "nothing to draw on this axis" }));
      return;
    }
    const tables = lines.map((line) => [line.xs, line.ys]);
    const joined = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const plot = new uPlot(options(figure, chart, lines, box.clientWidth), joined, box);
    if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
    plots.set(figure, plot);
  }
  const redraw = () => figures().filter((figure) => visible.has(figure)).forEach(draw);

  function show(ends) {
    zoom = ends;
    document.getElementById("whole").hidden = !ends;
    for (const plot of plots.values()) {
      const xs = plot.data[0];
      plot.setScale("x", ends ? { min: ends[0], max: ends[1] } : { min: xs[0], max: xs[xs.length - 1] });
    }
  }

  // ------------------------------------------------------------------------------------------- the page

  const MARGIN = 300, waiting = [];
  let drawing = false;
  const seen = new IntersectionObserver((entries) => {
    want(entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target));
  }, { rootMargin: MARGIN + "px" });
  function watchFigures() {  // those in view are not kept waiting for the observer
    const now = figures().filter((figure) => figure.getBoundingClientRect().top < innerHeight + MARGIN);
    for (const figure of figures()) if (!now.includes(figure)) seen.observe(figure);
    want(now);
  }
  function want(wanted) {
    for (const figure of wanted) {
      if (visible.has(figure)) continue;
      visible.add(figure);
      waiting.push(figure);
    }
    if (!drawing) drawNext();
  }
  function drawNext() {  // one picture at a time: the first one is there soon
    const figure = waiting.shift();
    drawing = Boolean(figure);
    if (!figure) return;
    if (figure.isConnected && !plots.has(figure)) draw(figure);
    let gone = false;
    const next = () => {
      if (!gone) drawNext();
      gone = true;
    };
    requestAnimationFrame(() => setTimeout(next));
    setTimeout(next, 200);  // a tab in the background has no frames
  }

  function press(buttons, pressed) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === pressed));
  }
  function begin() {
    figures().forEach(addKey);
    watchFigures();
    const controls = document.querySelector(".controls");
    if (!controls) return;
    controls.hidden = false;
    const axes = [...controls.querySelectorAll("[data-axis]")];
    for (const button of axes) {
      button.addEventListener("click", () => {
        axis = button.dataset.axis;
        press(axes, button);
        show(null);
        redraw();
      });
    }
    enable();
    toggle("logarithmic", () => (logarithmic = !logarithmic));
    toggle("smooth", () => (smooth = !smooth));
    document.getElementById("whole").addEventListener("click", () => show(null));
  }
  function toggle(name, turn) {
    const button = document.getElementById(name);
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(turn()));
      redraw();
    });
  }
  function enable() {
    const curves = data.runs.flatMap((run) => Object.values(run.curves));
    const known = { batch: true, time: curves.some((curve) => curve.t), samples: data.runs.some((run) => run.samples) };
    for (const button of document.querySelectorAll("[data-axis]")) button.disabled = !known[button.dataset.axis];
  }
  function pressDots() {
    for (const button of document.querySelectorAll("[data-run]")) {
      button.setAttribute("aria-pressed", String(!hidden.has(data.runs[button.dataset.run].label)));
    }
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-run]");
    if (!button) return;
    const label = data.runs[button.dataset.run].label;
    if (!hidden.delete(label)) hidden.add(label);
    pressDots();
    redraw();
  });
  addEventListener("resize", () => {
    for (const [figure, plot] of plots) plot.setSize({ width: figure.querySelector(".plot").clientWidth, height: HEIGHT });
  });
  begin();
})();
