"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 3]];
  const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
  const big = (value) => (value == null ? "" : Math.abs(value) < 1e5 && value === Math.round(value)
    ? value.toLocaleString("en") : compact.format(value));
  const fine = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2)
      : String(Number(value.toPrecision(5)));
  };
  const clear = (name, share) => `color-mix(in srgb, ${color(name)} ${share}%, transparent)`;
  const add = (parent, tag, css, text) => {
    const node = parent.appendChild(document.createElement(tag));
    node.className = css;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const figureOf = (box) => {
    const where = box.dataset.where;
    const list = where === "comparison" ? data.comparison : data.runs[where].figures;
    return [list[box.dataset.figure], where === "comparison" ? [] : data.runs[where].events];
  };

  // Lines.

  function seriesOf(figure) {
    const tables = [], series = [{label: figure.x_name, value: (_, v) => big(v)}], bands = [];
    figure.series.forEach((one, i) => {
      const stroke = color("c" + (i % 6)), few = one.marked || (one.x.length < 40 && !one.level);
      tables.push(one.low.length ? [one.x, one.y, one.low, one.high] : [one.x, one.y]);
      series.push({
        label: one.name, stroke, width: 2, dash: DASHES[Math.floor(i / 6) || (i % 6)],
        value: (_, v) => fine(v), points: {show: few, size: one.marked ? 7 : 4, fill: stroke},
      });
      if (one.low.length) {
        const at = series.length;
        for (const end of ["low", "high"])
          series.push({label: `${one.name}, ${end} end`, class: "end", stroke: clear("c" + (i % 6), 40),
            width: 1, value: (_, v) => fine(v), points: {show: false}});
        bands.push({series: [at + 1, at], fill: clear("c" + (i % 6), 15)});
      }
    });
    return {data: uPlot.join(tables), series, bands};
  }

  function marksOf(figure, events) {
    return figure.events.map((i) => ({x: events[i].step, number: i + 1, event: events[i]}));
  }

  function drawLines(box, figure, events) {
    const {data: points, series, bands} = seriesOf(figure);
    const marks = marksOf(figure, events);
    const axis = {stroke: color("soft"), grid: {stroke: color("line"), width: 1},
      ticks: {stroke: color("line"), width: 1}};
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    const shade = (u) => {
      const {left, top, width, height} = u.bbox;
      u.ctx.save();
      u.ctx.beginPath();
      u.ctx.rect(left, top, width, height);
      u.ctx.clip();
      figure.phases.forEach(([name, from, to], i) => {
        const a = Math.max(u.valToPos(from, "x", true), left);
        const b = Math.min(u.valToPos(to, "x", true), left + width);
        if (b <= a) return;
        u.ctx.fillStyle = i % 2 ? "transparent" : color("shade");
        u.ctx.fillRect(a, top, b - a, height);
        u.ctx.fillStyle = color("soft");
        u.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
        u.ctx.textBaseline = "bottom";
        if (u.ctx.measureText(name).width + 6 * devicePixelRatio < b - a)
          u.ctx.fillText(name, a + 4 * devicePixelRatio, top + height - 4 * devicePixelRatio);
      });
      u.ctx.restore();
    };
    const mark = (u) => {
      const {left, top, width, height} = u.bbox;
      u.ctx.save();
      u.ctx.strokeStyle = u.ctx.fillStyle = color("text");
      u.ctx.font = `bold ${11 * devicePixelRatio}px system-ui, sans-serif`;
      u.ctx.textBaseline = "top";
      u.ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      for (const one of marks) {
        const x = u.valToPos(one.x, "x", true);
        if (x < left || x > left + width) continue;
        u.ctx.beginPath();
        u.ctx.moveTo(x, top);
        u.ctx.lineTo(x, top + height);
        u.ctx.stroke();
        u.ctx.fillText(String(one.number), x + 3 * devicePixelRatio, top + 2 * devicePixelRatio);
      }
      u.ctx.restore();
    };
    const tell = (u) => {
      const near = marks.find((m) => Math.abs(u.valToPos(m.x, "x") - u.cursor.left) < 8);
      tip.hidden = !near || u.cursor.left < 0;
      if (tip.hidden) return;
      const {event, number} = near;
      tip.textContent = [`Event ${number}, step ${event.step}: ${event.what}`,
        event.cause && `Because of ${event.cause}`, event.evidence, event.effect]
        .filter(Boolean).join("\n");
    };
    const plot = new uPlot({
      width: box.clientWidth, height: box.clientWidth < 480 ? 220 : 280, series, bands,
      scales: {x: {time: false}, y: {distr: figure.log ? 3 : 1}},
      axes: [{...axis, values: (_, splits) => splits.map(big)},
        {...axis, size: 64, label: figure.unit || undefined, labelSize: 18,
          values: (_, splits) => splits.map((v) => (v == null ? "" : fine(v)))}],
      cursor: {focus: {prox: 24}},
      hooks: {ready: [(u) => u.over.appendChild(tip)], drawClear: [shade], draw: [mark],
        setCursor: [tell]},
    }, points, box);
    box.onkeydown = (pressed) => {
      const by = {ArrowLeft: -1, ArrowRight: 1}[pressed.key];
      if (!by) return;
      pressed.preventDefault();
      const xs = plot.data[0], now = plot.cursor.idx == null ? (by > 0 ? -1 : xs.length)
        : plot.cursor.idx;
      const next = Math.min(Math.max(now + by, 0), xs.length - 1);
      plot.setCursor({left: plot.valToPos(xs[next], "x"), top: plot.over.clientHeight / 2});
    };
    return plot;
  }

  // Maps. The colours are those of cividis, which are told apart with every kind of sight.

  const STOPS = [[0, 34, 78], [59, 73, 108], [112, 113, 115], [169, 157, 106], [254, 232, 56]];
  const shadeOf = (share) => {
    const at = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1);
    const low = Math.min(Math.floor(at), STOPS.length - 2);
    return STOPS[low].map((c, i) => Math.round(c + (at - low) * (STOPS[low + 1][i] - c)));
  };

  function drawHeat(box, figure) {
    const rows = figure.values.length, columns = figure.x.length;
    const known = figure.values.flat().filter((v) => v != null);
    const least = Math.min(...known), greatest = Math.max(...known);
    const canvas = add(box, "canvas", "");
    canvas.width = columns;
    canvas.height = rows;
    canvas.style.height = `${Math.min(Math.max(rows * 18, 60), 420)}px`;
    const image = new ImageData(columns, rows);
    figure.values.forEach((row, r) => row.forEach((value, c) => {
      if (value == null) return; // stays transparent
      const share = greatest > least ? (value - least) / (greatest - least) : 0;
      image.data.set([...shadeOf(share), 255], 4 * (r * columns + c));
    }));
    canvas.getContext("2d").putImageData(image, 0, 0);
    const ends = add(box, "div", "ends");
    add(ends, "span", "", `${figure.x_name} ${big(figure.x[0])}`);
    add(ends, "span", "", `${figure.rows[0]} on top, ${figure.rows[rows - 1]} at the bottom`);
    add(ends, "span", "", big(figure.x[columns - 1]));
    const read = add(box, "div", "read"), said = add(read, "span", "", "\u00a0");
    said.setAttribute("aria-live", "polite");
    const scale = add(read, "span", "ends");
    add(scale, "span", "", fine(least));
    const bar = add(scale, "span", "scale");
    bar.style.background = `linear-gradient(to right, ${STOPS.map((s) => `rgb(${s})`)})`;
    add(scale, "span", "", `${fine(greatest)} ${figure.unit}`);
    const at = {r: 0, c: -1};
    const tell = () => {
      said.textContent = `${figure.rows[at.r]}, ${figure.x_name} ${big(figure.x[at.c])}: `
        + fine(figure.values[at.r][at.c]);
    };
    canvas.onpointermove = (moved) => {
      const {left, top, width, height} = canvas.getBoundingClientRect();
      at.c = Math.min(Math.floor((moved.clientX - left) / width * columns), columns - 1);
      at.r = Math.min(Math.floor((moved.clientY - top) / height * rows), rows - 1);
      if (at.c >= 0 && at.r >= 0) tell();
    };
    box.onkeydown = (pressed) => {
      const by = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
      const [down, right] = by[pressed.key] || [];
      if (down === undefined) return;
      pressed.preventDefault();
      at.r = Math.min(Math.max(at.r + down, 0), rows - 1);
      at.c = Math.min(Math.max(at.c + right, 0), columns - 1);
      tell();
    };
    return null;
  }

  // What is near the screen is drawn; again when the colours change, and all of it for print.

  const boxes = [...document.querySelectorAll("[data-figure]")], plots = new Map();
  const draw = (box) => {
    if (!box.clientWidth) return;
    plots.get(box)?.destroy();
    box.replaceChildren();
    const [figure, events] = figureOf(box);
    plots.set(box, figure.kind === "heat" ? drawHeat(box, figure) : drawLines(box, figure, events));
  };
  const redraw = () => [...plots.keys()].forEach(draw);
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && !plots.has(entry.target)) draw(entry.target);
  }), {rootMargin: "400px"});
  const sized = new ResizeObserver((entries) => entries.forEach(({target}) => {
    const plot = plots.get(target);
    if (plot && target.clientWidth && target.clientWidth !== plot.width)
      plot.setSize({width: target.clientWidth, height: plot.height});
  }));
  boxes.forEach((box) => { seen.observe(box); sized.observe(box); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { root.dataset.print = ""; boxes.forEach(draw); });
  addEventListener("afterprint", () => { delete root.dataset.print; redraw(); });
})();
