// Charts: uPlot with this page's colours, a line that says what is under the cursor, arrow keys, a table beside.

const CHARTS = [];

// A chart in `host`. what: {
//   label     what a screen reader says of it
//   height    pixels
//   x         {title, log, form(value) -> text, ticks(value) -> text, range: [low, high]}
//   y         {form, ticks(values) -> texts, range: [low, high]}
//   series    [{name, colour, x, y, low, high, points, dash, width, error, quiet}]   each with its own x; error: half of
//             the bar at each point, cut to [0, 1]
//   lines     [{value, label, colour, trouble}] across, [{at, label}] upright
//   stacks    [{start, end, parts}] drawn as shares from the bottom, colours: [name]
//   say(x)    the text under the cursor, where it is not the series' own
//   stops     the x values that arrow keys go to
// }
function drawChart(host, what) {
  const readout = make('p', { class: 'readout' });
  const box = make('div', { class: 'plot', tabindex: '0', role: 'img', 'aria-label': what.label });
  host.replaceChildren(box, readout);
  const chart = { host, box, readout, what, plot: null, at: -1, zoom: null };
  box.addEventListener('keydown', (event) => moveCursor(chart, event));
  box.addEventListener('blur', () => leave(chart));
  const index = CHARTS.findIndex((other) => other.host === host);
  if (index >= 0) {
    CHARTS[index].plot.destroy();
    RESIZES.unobserve(CHARTS[index].box);
    CHARTS.splice(index, 1);
  }
  CHARTS.push(chart);
  build(chart);
  RESIZES.observe(box);
}

const RESIZES = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const chart = CHARTS.find((one) => one.box === entry.target);
    const width = Math.floor(entry.contentRect.width);
    if (chart && width > 0 && width !== chart.plot.width) chart.plot.setSize({ width, height: chart.what.height });
  }
});

// In other colours.
function redrawCharts() {
  for (const chart of CHARTS) {
    chart.plot.destroy();
    build(chart);
  }
}

function build(chart) {
  const { what, box } = chart;
  const axis = {
    stroke: colour('muted'),
    font: '12px system-ui, sans-serif',
    grid: { show: !what.stacks, stroke: colour('grid'), width: 1 },
    ticks: { show: false },
  };
  const [rows, series, bands] = columns(what);
  const options = {
    width: Math.max(120, Math.floor(box.clientWidth)),
    height: what.height,
    padding: [10, 10, 0, 0],
    legend: { show: false },
    cursor: {
      y: false,
      points: { size: 7 },
      drag: { x: true, y: false, dist: 8, setScale: false },
      bind: { dblclick: () => () => zoom(chart, null) },
      dataIdx: (plot, seriesIndex, near) => nearest(plot.data[seriesIndex], near),
    },
    scales: {
      x: { time: false, distr: what.x.log ? 3 : 1, range: () => chart.zoom || what.x.range },
      y: { range: () => what.y.range },
    },
    axes: [
      {
        ...axis,
        size: 28,
        space: 60,
        values: (plot, ticks) => ticks.map((tick) => (tick === null ? '' : what.x.ticks(tick))),
        ...(what.x.log
          ? {
              splits: (plot) => logTicks(plot.scales.x.min, plot.scales.x.max, box.clientWidth),
              filter: (plot, ticks) => ticks,
            }
          : {}),
      },
      {
        ...axis,
        size: (plot, texts) => Math.max(46, 14 + 6.6 * Math.max(...(texts || ['']).map((text) => text.length))),
        space: 26,
        values: (plot, ticks) => what.y.ticks(ticks),
      },
    ],
    series,
    bands,
    hooks: {
      drawClear: [(plot) => stacks(plot, what)],
      draw: [(plot) => overlay(plot, what)],
      setCursor: [() => say(chart)],
      setSelect: [(plot) => select(chart, plot)],
    },
  };
  chart.plot = new uPlot(options, rows, box);
  const canvas = box.querySelector('canvas');
  canvas.setAttribute('aria-hidden', 'true');
  say(chart);
}

// uPlot's columns: every series and its band on one x axis.
function columns(what) {
  const tables = [];
  const series = [{}];
  const bands = [];
  for (const one of what.series) {
    const kept = one.x
      .map((value, at) => at)
      .filter((at) => known(one.x[at]) && (!what.x.log || one.x[at] > 0) && (!one.sparse || known(one.y[at])));
    const pick = (values) => kept.map((at) => values[at]);
    const parts = [pick(one.x), pick(one.y)];
    const stroke = colour(one.colour);
    series.push({
      stroke,
      pxAlign: 0,
      width: one.points ? 0 : one.width || 2,
      dash: one.dash,
      paths: one.points ? () => null : undefined,
      points: one.points ? { show: true, size: 7, fill: stroke, stroke } : { show: kept.length === 1 },
    });
    if (one.low) {
      parts.push(pick(one.low), pick(one.high));
      const edge = { stroke: 'transparent', width: 0, pxAlign: 0, points: { show: false } };
      series.push(edge, { ...edge });
      bands.push({ series: [series.length - 1, series.length - 2], fill: withAlpha(stroke, one.alpha || 0.16) });
    }
    tables.push(parts);
  }
  if (!tables.length)
    return [[what.stops || [0, 1], (what.stops || [0, 1]).map(() => null)], [{}, { show: false }], []];
  return [uPlot.join(tables), series, bands];
}

// What was dragged over becomes the range; null: all of it again.
function select(chart, plot) {
  const { left, width } = plot.select;
  if (!(width > 0)) return;
  const range = [plot.posToVal(left, 'x'), plot.posToVal(left + width, 'x')];
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  zoom(chart, range);
}

function zoom(chart, range) {
  chart.zoom = range;
  const [min, max] = range || chart.what.x.range;
  chart.plot.setScale('x', { min, max });
}

function withAlpha(hex, alpha) {
  const number = parseInt(hex.slice(1), 16);
  return `rgba(${number >> 16}, ${(number >> 8) & 255}, ${number & 255}, ${alpha})`;
}

// 1, 2, 5 of each decade, or decades alone where there is no room.
function logTicks(low, high, width) {
  const decades = Math.log10(high / low);
  const room = width / 70;
  const steps = decades * 3 <= room ? [1, 2, 5] : decades * 2 <= room ? [1, 3] : [1];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const step of steps) {
      const tick = Number((step * 10 ** power).toPrecision(3));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

function nearest(values, near) {
  for (let away = 0; away < values.length; away += 1) {
    if (known(values[near - away])) return near - away;
    if (known(values[near + away])) return near + away;
  }
  return near;
}

// ---- what uPlot does not draw

function stacks(plot, what) {
  if (!what.stacks) return;
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const fills = what.colours.map((name) => colour(name));
  for (const { start, end, parts } of what.stacks) {
    const left = plot.valToPos(start, 'x', true);
    const width = plot.valToPos(end, 'x', true) - left;
    let top = bbox.top + bbox.height;
    parts.forEach((share, part) => {
      top -= share * bbox.height;
      ctx.fillStyle = fills[part];
      // A hair wider, so that neighbours leave no seam.
      ctx.fillRect(left, top, width + 0.7, share * bbox.height + 0.7);
    });
  }
  ctx.restore();
}

function overlay(plot, what) {
  const { ctx, bbox } = plot;
  const ratio = uPlot.pxRatio;
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = 'alphabetic';
  ctx.lineWidth = ratio;
  // Error bars end where the axes do.
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const one of what.series) {
    if (!one.error) continue;
    ctx.strokeStyle = withAlpha(colour(one.colour), 0.55);
    one.x.forEach((x, at) => {
      if (!known(one.error[at]) || !known(one.y[at]) || x < plot.scales.x.min || x > plot.scales.x.max) return;
      const left = plot.valToPos(x, 'x', true);
      ctx.beginPath();
      ctx.moveTo(left, plot.valToPos(Math.max(0, one.y[at] - one.error[at]), 'y', true));
      ctx.lineTo(left, plot.valToPos(Math.min(1, one.y[at] + one.error[at]), 'y', true));
      ctx.stroke();
    });
  }
  ctx.restore();
  for (const line of what.lines || []) {
    ctx.strokeStyle = colour(line.colour || 'muted');
    ctx.fillStyle = ctx.strokeStyle;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.beginPath();
    if (known(line.at)) {
      if (line.at < plot.scales.x.min || line.at > plot.scales.x.max) continue;
      const left = plot.valToPos(line.at, 'x', true);
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.textAlign = left > bbox.left + bbox.width / 2 ? 'right' : 'left';
      if (line.label)
        ctx.fillText(line.label, left + (ctx.textAlign === 'right' ? -5 : 5) * ratio, bbox.top + 11 * ratio);
    } else {
      if (line.value < plot.scales.y.min || line.value > plot.scales.y.max) continue;
      const top = plot.valToPos(line.value, 'y', true);
      ctx.moveTo(bbox.left, top);
      ctx.lineTo(bbox.left + bbox.width, top);
      // A series that falls to its line is there on the right, where the label would be in its way.
      ctx.textAlign = line.trouble === 'below' ? 'left' : 'right';
      const side = ctx.textAlign === 'left' ? bbox.left + 4 * ratio : bbox.left + bbox.width - 4 * ratio;
      const under = top - bbox.top < 14 * ratio;
      if (line.label) ctx.fillText(line.label, side, top + (under ? 12 : -4) * ratio);
    }
    ctx.stroke();
  }
  ctx.restore();
}

// ---- the cursor

function say(chart) {
  const { plot, what, readout } = chart;
  if (!plot) return;
  const index = plot.cursor.idx;
  const there = known(index) && known(plot.cursor.left) && plot.cursor.left >= 0;
  if (!there) {
    readout.textContent = what.rest || '\u00a0';
    return;
  }
  const x = plot.posToVal(plot.cursor.left, 'x');
  if (what.say) {
    readout.textContent = what.say(x);
    return;
  }
  const parts = what.series
    .filter((one) => !one.quiet)
    .map((one) => {
      const at = closest(one.x, x);
      return at < 0 || !known(one.y[at]) ? null : [one, at];
    })
    .filter((part) => part);
  if (!parts.length) return;
  const first = parts[0];
  const texts = parts.map(([one, at]) => {
    const range = one.low && known(one.low[at]) ? ` (${what.y.form(one.low[at])} to ${what.y.form(one.high[at])})` : '';
    return `${one.name ? `${one.name} ` : ''}${what.y.form(one.y[at])}${range}`;
  });
  readout.textContent = `${what.x.form(first[0].x[first[1]])}:  ${texts.join(',  ')}`;
}

function closest(values, x) {
  let best = -1;
  values.forEach((value, at) => {
    if (known(value) && (best < 0 || Math.abs(value - x) < Math.abs(values[best] - x))) best = at;
  });
  return best;
}

function moveCursor(chart, event) {
  const stops = (chart.what.stops || []).filter((x) => known(x) && (!chart.what.x.log || x > 0));
  const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -stops.length, End: stops.length };
  if (event.key === 'Escape') {
    leave(chart);
    return;
  }
  if (!(event.key in moves) || !stops.length || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  chart.at = Math.min(stops.length - 1, Math.max(0, chart.at + moves[event.key]));
  chart.readout.setAttribute('aria-live', 'polite');
  const { plot } = chart;
  plot.setCursor({ left: plot.valToPos(stops[chart.at], 'x'), top: plot.over.clientHeight / 2 });
}

function leave(chart) {
  chart.at = -1;
  chart.readout.removeAttribute('aria-live');
  if (chart.plot) chart.plot.setCursor({ left: -10, top: -10 });
}
