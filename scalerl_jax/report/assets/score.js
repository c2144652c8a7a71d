// The score against compute with its fits; parts of a mixture; what the run came to, in a few figures.

const AXES = {
  typical_hours: { title: 'typical device-hours', form: (value) => `${plain(value)} device-hours`, ticks: plain },
  device_hours: { title: 'device-hours', form: (value) => `${plain(value)} device-hours`, ticks: plain },
  step: { title: 'updates', form: (value) => `update ${Math.round(value)}`, ticks: short },
};

const MAIN = 'typical_hours'; // of figures, tables and the chart at first

const ALL = '';

// The score of one environment of a mixture, or of the whole run; a run without that environment has none to show.
function scoreOf(run, state) {
  return state.part === ALL ? run.score : run.score.environments[state.part];
}

function scoreSection() {
  const body = section('score', 'Pass rate against compute');
  const evaluated = RUNS.filter((run) => run.score.evaluations.step.length);
  if (!evaluated.length) {
    body.append(make('p', { class: 'none', text: 'No evaluation is done yet.' }));
    return body;
  }
  const state = { axis: MAIN, scale: 'linear', part: ALL, all: true, half: evaluated.length === 1 };
  const parts = [...new Set(evaluated.flatMap((run) => Object.keys(run.score.environments)))];
  const host = make('div');
  const legend = make('ul', { class: 'legend' });
  const said = make('div', { class: 'said' });
  const redraw = () =>
    drawScore(
      host,
      legend,
      said,
      evaluated.filter((run) => scoreOf(run, state)),
      state,
    );
  const change = (name) => (value) => {
    state[name] = value;
    redraw();
  };
  const controls = make(
    'div',
    { class: 'controls' },
    parts.length
      ? choice('part', 'Environment', [[ALL, 'All'], ...parts.map((name) => [name, name])], state.part, change('part'))
      : null,
    choice(
      'axis',
      'Compute',
      [
        ['typical_hours', 'Typical device-hours'],
        ['device_hours', 'Device-hours'],
        ['step', 'Updates'],
      ],
      state.axis,
      change('axis'),
    ),
    choice(
      'scale',
      'Axis',
      [
        ['linear', 'Linear'],
        ['log', 'Log'],
      ],
      state.scale,
      change('scale'),
    ),
    make(
      'fieldset',
      { class: 'checks' },
      make('legend', { text: 'Fitted' }),
      checkbox('on all evaluations', state.all, change('all')),
      checkbox('on the first half', state.half, change('half')),
    ),
  );
  const numbers = tableOf(
    'Evaluations',
    ['run', 'update', 'typical device-hours', 'device-hours', 'pass rate', 'standard error', 'trials'],
    () =>
      evaluated.flatMap((run) =>
        run.score.evaluations.step.map((step, at) => {
          const rows = run.score.evaluations;
          return [
            run.name,
            step,
            plain(rows.typical_hours[at]),
            plain(rows.device_hours[at]),
            decimals(rows.pass_rate[at]),
            decimals(rows.deviation[at], 4),
            `${rows.prompts[at]} × ${rows.samples[at]}`,
          ];
        }),
      ),
  );
  body.append(make('div', { class: 'card' }, controls, legend, host, said, numbers));
  const charts = partCharts(evaluated);
  if (charts) body.append(charts);
  body.drawn = redraw;
  return body;
}

function drawScore(host, legend, said, runs, state) {
  const axis = AXES[state.axis];
  const series = [];
  const lines = [];
  const marks = [];
  runs.forEach((run) => {
    const at = RUNS.indexOf(run);
    const name = RUNS.length > 1 ? run.name : '';
    const { evaluations: rows, curves: every } = scoreOf(run, state);
    const curves = every[state.axis] || {};
    const single = RUNS.length === 1;
    const mine = single ? 'ink' : runColour(at);
    const fits = [];
    if (state.all && curves.all && curves.all.x) fits.push([curves.all, single ? 'c0' : mine, 'fit', runDash(at)]);
    if (state.half && curves.half && curves.half.x)
      fits.push([curves.half, single ? 'c1' : mine, 'fitted on half', [6, 4]]);
    for (const [curve, stroke, what, dash] of fits) {
      const beyond = curve.x.findIndex((x) => x > curve.until); // from there on all laws forecast, not this one alone
      for (const [from, to, kind, drawn] of [
        [0, beyond, what, dash],
        [beyond, curve.x.length, 'forecast', [2, 4]],
      ])
        series.push({
          name: `${name} ${kind}`.trim(),
          colour: stroke,
          dash: drawn,
          ...Object.fromEntries(['x', 'y', 'low', 'high'].map((key) => [key, curve[key].slice(from, to)])),
          alpha: runs.length > 3 ? 0.07 : 0.14,
        });
    }
    series.push({
      name: name || 'evaluated',
      colour: mine,
      points: true,
      x: rows[state.axis],
      y: rows.pass_rate,
      error: rows.deviation.map((value) => (known(value) ? 1.645 * value : null)),
    });
    if (single) {
      marks.push([swatch(mine, 'dot'), 'evaluations; bars: 90 % interval of the sampling noise']);
      for (const [curve, stroke, what] of fits)
        marks.push([
          swatch(stroke, 'band'),
          `${what === 'fit' ? 'sigmoid fitted on' : 'on'} ${curve.what}; dotted: forecast; ${percent(curve.level)} band`,
        ]);
    } else marks.push([swatch(mine, 'dot'), name]);
    if (single && state.half && curves.half && curves.half.x) {
      lines.push({ at: Math.max(...rows[state.axis]) / 2, label: 'half of the compute' });
    }
  });
  // Points are named before curves, wherever they are drawn.
  series.sort((one, other) => Number(Boolean(one.points)) - Number(Boolean(other.points)));
  legend.replaceChildren(...marks.map(([mark, text]) => make('li', {}, mark, make('span', { text }))));
  const [low, high] = xRange(series, state);
  const first = scoreOf(runs[0], state).evaluations;
  drawChart(host, {
    label: `Pass rate against ${axis.title}. ${runs.map((run) => oneSentence(run, state)).join(' ')} Arrow keys go through the evaluations.`,
    height: 380,
    x: { ...axis, log: state.scale === 'log', range: [low, high] },
    y: { form: decimals, ticks: evenTicks(decimals), range: yRange(series) },
    series,
    lines,
    stops: first[state.axis],
    rest:
      state.scale === 'log'
        ? `${axis.title}; update 0 has no place on a log axis`
        : `${axis.title}; drag to zoom, double-click to see all`,
    say: (x) => sayScore(runs, state, x),
  });
  const words = runs.flatMap((run) => verdicts(run, state));
  if (runs.length === 1 || !words.length) said.replaceChildren(...words);
  else {
    const open = said.querySelector('details[open]') !== null;
    said.replaceChildren(make('details', { open }, make('summary', { text: 'What the fits say' }), ...words));
  }
}

function sayScore(runs, state, x) {
  return runs
    .map((run) => {
      const { evaluations: rows, curves } = scoreOf(run, state);
      const curve = (curves[state.axis] || {}).all;
      const last = Math.max(...rows[state.axis]);
      const name = RUNS.length > 1 ? `${run.name}: ` : '';
      if (x > last * 1.01 && curve && curve.x) {
        const at = closest(curve.x, x);
        const band = between(curve.level, curve.low[at], curve.high[at]);
        return `${name}${AXES[state.axis].form(curve.x[at])}: forecast ${decimals(curve.y[at])} ${band}`;
      }
      const at = closest(rows[state.axis], x);
      const fitted = curve && curve.x ? `, fit ${decimals(curve.y[closest(curve.x, rows[state.axis][at])])}` : '';
      const where = AXES[state.axis].form(rows[state.axis][at]);
      return `${name}update ${rows.step[at]}, ${where}: ${decimals(rows.pass_rate[at])}${fitted}`;
    })
    .join('   ');
}

function xRange(series, state) {
  const all = series.flatMap((one) => one.x).filter((value) => known(value) && (state.scale === 'linear' || value > 0));
  const points = series
    .filter((one) => one.points)
    .flatMap((one) => one.x)
    .filter((value) => known(value) && value > 0);
  const most = Math.max(...all);
  if (state.scale === 'linear')
    return [-0.02 * Math.max(...points, 0), points.length === all.length ? most * 1.03 : most];
  return [Math.min(...points, most) / 1.6, points.length === all.length ? most * 1.1 : most];
}

function yRange(series) {
  const values = series
    .flatMap((one) => (one.points ? barEnds(one) : [...one.y, ...(one.high || []), ...(one.low || [])]))
    .filter(known);
  return [Math.max(0, Math.min(...values) - 0.06), Math.min(1.03, Math.max(...values) + 0.06)];
}

// Points with the ends of their error bars; a pass rate ends at 0 and at 1.
function barEnds(one) {
  if (!one.error) return one.y;
  return one.y.flatMap((value, at) =>
    known(value) ? [Math.max(0, value - (one.error[at] || 0)), Math.min(1, value + (one.error[at] || 0))] : [],
  );
}

function oneSentence(run, state) {
  const rows = scoreOf(run, state).evaluations;
  const last = rows.step.length - 1;
  const [first, latest] = [decimals(rows.pass_rate[0]), decimals(rows.pass_rate[last])];
  return `${run.name}: ${last + 1} evaluations, from ${first} to ${latest} at update ${rows.step[last]}.`;
}

function between(level, low, high) {
  return `(${percent(level)}: ${decimals(low)} to ${decimals(high)})`;
}

// What the fits of a run say, in words.
function verdicts(run, state) {
  const curves = scoreOf(run, state).curves[state.axis];
  if (!curves) return [];
  const name = RUNS.length > 1 ? `${run.name}: ` : '';
  const out = [];
  const { all, half } = curves;
  const upper = (text) => `${text[0].toUpperCase()}${text.slice(1)}`;
  if (all && all.x) out.push(`${name}${upper(all.sentence)}.`);
  else if (all) out.push(`${name}No fit yet: ${all.why}.`);
  if (half && half.sentence) out.push(`${name}${upper(half.sentence)}.`);
  else if (half && half.why) out.push(`${name}No forecast from the first half: ${half.why}.`);
  return out.map((text) => make('p', { text }));
}

// ---- parts of a mixture

function partCharts(runs) {
  const cards = runs.flatMap((run) => {
    const environments = Object.entries(run.score.environments).map(([name, { evaluations }]) => ({
      name,
      prompts: evaluations.prompts.at(-1),
      step: evaluations.step,
      pass_rate: evaluations.pass_rate,
      left_out: 0,
    }));
    const tasks = run.score.tasks.map((task) => ({ ...task, step: run.score.evaluations.step }));
    return [
      ['environment', environments],
      ['task', tasks],
    ]
      .filter(([, parts]) => parts.length)
      .map(([kind, parts]) => partChart(run, kind, parts));
  });
  return cards.length ? make('div', { class: 'grid wide' }, ...cards) : null;
}

function partChart(run, kind, unsorted) {
  const parts = [...unsorted].sort((one, other) => one.name.localeCompare(other.name, 'en', { numeric: true }));
  const x = run.score.evaluations.step;
  const series = parts.map((part, at) => ({
    name: part.name,
    colour: runColour(at),
    dash: runDash(at),
    x: part.step,
    y: part.pass_rate,
  }));
  const host = make('div');
  const marks = parts.map((part, at) =>
    make('li', {}, swatch(runColour(at)), make('span', { text: `${part.name} (${part.prompts})` })),
  );
  const latest = parts.map((part) => `${part.name} ${decimals(part.pass_rate.at(-1))}`);
  const left = parts[0].left_out;
  const card = make(
    'div',
    { class: 'card' },
    make('h3', { text: RUNS.length > 1 ? `By ${kind}: ${run.name}` : `By ${kind}` }),
    make('p', {
      class: 'what',
      text:
        'held-out pass rate of each part, its prompts in brackets' + (left ? `; ${left} smaller parts are left out` : ''),
    }),
    make('ul', { class: 'legend' }, ...marks),
    host,
    tableOf(`Pass rate by ${kind}`, ['update', ...parts.map((part) => part.name)], () =>
      x.map((step) => [step, ...parts.map((part) => decimals(part.pass_rate[part.step.indexOf(step)]))]),
    ),
  );
  card.drawn = () =>
    drawChart(host, {
      label: `Pass rate by ${kind} against updates: ${latest.join(', ')}.`,
      height: 260,
      x: { ...AXES.step, range: [x[0], Math.max(x[0] + 1, x.at(-1))] },
      y: { form: decimals, ticks: evenTicks(decimals), range: yRange(series) },
      series,
      stops: x,
      rest: 'updates',
    });
  return card;
}

// ---- the head of the page

// A figure with its name above and small lines below; lines that are empty are left out.
function makeTile(name, value, ...lines) {
  return make(
    'div',
    { class: 'tile' },
    make('dt', { text: name }),
    make(
      'dd',
      {},
      make('span', { class: 'figure', text: value }),
      ...lines.filter(Boolean).map((text) => make('span', { class: 'small', text })),
    ),
  );
}

function figures(run) {
  const rows = run.score.evaluations;
  const last = rows.step.length - 1;
  const curves = run.score.curves[MAIN] || {};
  const { hours } = run.totals;
  const busy = (side) => hours[side].busy / (hours[side].busy + hours[side].idle || 1);
  const tiles = [];
  const tile = (...parts) => tiles.push(makeTile(...parts));
  if (last >= 0) {
    tile(
      'Pass rate',
      decimals(rows.pass_rate[last]),
      `from ${decimals(rows.pass_rate[0])}, update ${rows.step[last]}`,
      `${rows.prompts[last]} prompts × ${rows.samples[last]}, held out`,
    );
  }
  if (curves.half && curves.half.forecast) {
    const [value, low, high] = curves.half.forecast;
    tile(
      'Forecast at half time',
      decimals(value),
      `${percent(curves.half.level)}: ${decimals(low)} to ${decimals(high)}`,
      curves.half.outcome,
      `by ${AXES[MAIN].title}`,
    );
  }
  if (curves.all && curves.all.x) {
    const [low, high] = curves.all.intervals.asymptote;
    tile(
      'Highest pass rate ahead (A)',
      curves.all.identified ? decimals(curves.all.asymptote) : 'not known yet',
      curves.all.fits ? `95 %: ${decimals(low)} to ${decimals(high)}` : 'no law describes these evaluations',
      'with unlimited compute',
      `steepness B ${plain(curves.all.exponent)}; half of the gain at C_mid = ${AXES[MAIN].form(curves.all.midpoint)}`,
    );
  }
  tile(
    'Updates',
    `${run.updates}`,
    `of ${run.planned} planned, ${run.optimizer_steps} with a gradient`,
    `${duration(run.seconds)} of running` + (run.starts > 1 ? `, ${run.starts} starts` : ''),
  );
  tile(
    'Compute',
    short(run.totals.device_hours),
    'device-hours, evaluation and set-up apart',
    flops(run.totals.model_flops),
    `busy: trainer ${percent(busy('trainer'), 0)}, generators ${percent(busy('generator'), 0)}`,
  );
  const { alarms } = run.health;
  tile(
    'Health',
    alarms.length ? `${alarms.length} alarm${alarms.length > 1 ? 's' : ''}` : 'no alarm',
    alarms.length ? alarms.map((alarm) => titleOf(run, alarm.chart)).join(', ') : 'every series within its limits',
    `judged on the last ${run.health.recent} updates`,
  );
  return make('dl', { class: 'tiles' }, ...tiles);
}

function titleOf(run, key) {
  const found = run.health.charts.find((chart) => chart.key === key);
  return (found ? found.title : key).toLowerCase();
}

// A warm start has no rollouts: its loss, its updates, its time.
function warmStartFigures(run) {
  const chart = run.health.charts.find((one) => one.key === 'loss');
  const losses = chart ? chart.series[0].mean.filter(known) : [];
  const tiles = [
    ['Loss', decimals(losses.at(-1)), `from ${decimals(losses[0])}`, 'negative log-likelihood of a token, nats'],
    ['Updates', `${run.updates}`, `of ${run.planned} planned`],
    ['Time', duration(run.seconds), 'between the first and the last row of metrics, pauses left out'],
  ];
  return make(
    'dl',
    { class: 'tiles' },
    ...tiles.map((parts) => makeTile(...parts)),
  );
}

// Several runs beside each other.
function comparison() {
  const body = section('compare', 'Comparison');
  const two = (text, under) =>
    make('span', { class: 'over-under' }, make('span', { text }), make('span', { class: 'small', text: under }));
  const interval = (curve, name, form) => {
    if (!curve || !curve.x) return MISSING;
    const [low, high] = curve.intervals[name];
    return two(form(curve[name]), `${known(low) ? form(low) : 'open'} to ${known(high) ? form(high) : 'open'}`);
  };
  const rows = RUNS.map((run, at) => {
    const scores = run.score.evaluations.pass_rate;
    const { all, half } = run.score.curves[MAIN] || {};
    const name = make('span', { class: 'named' }, swatch(runColour(at), 'dot'), make('span', { text: run.name }));
    const fitted = all && all.x;
    return [
      name,
      decimals(scores[0]),
      decimals(scores.at(-1)),
      interval(all, 'asymptote', decimals),
      fitted ? (all.identified ? 'yes' : 'no') : MISSING,
      interval(all, 'exponent', plain),
      interval(all, 'midpoint', AXES[MAIN].ticks),
      fitted ? two(decimals(all.double[1]), `${decimals(all.double[2])} to ${decimals(all.double[3])}`) : MISSING,
      half && half.forecast
        ? two(`${decimals(half.forecast[0])}, then ${decimals(half.measured)}`, `off by ${signed(half.error)}`)
        : MISSING,
      two(plain(run.totals.device_hours), `${run.updates} updates`),
    ];
  });
  body.append(
    make(
      'div',
      { class: 'card' },
      table(
        [
          'run',
          'before',
          'after',
          'A',
          'A identified',
          'B',
          `C_mid, ${AXES[MAIN].title}`,
          'at twice the compute',
          'half-time forecast',
          'device-hours',
        ],
        rows,
        `Comparison of the runs; A, B and C_mid with 95 % intervals, forecasts with 90 %, by ${AXES[MAIN].title}`,
      ),
    ),
  );
  body.append(
    make('p', {
      class: 'note',
      text:
        'A is the highest pass rate a run is heading for, B how steeply it rises, C_mid the compute at which half of ' +
        'the gain has come. A is identified where its interval is narrower than 0.04, closes below 1, and the run has ' +
        'gone well past C_mid. These intervals are 95 %, those of forecasts 90 %. Runs that differ only in their seed ' +
        'differ by up to 0.02 in A, which no interval here includes.',
    }),
  );
  return body;
}
