// Small charts of the updates with their limits, each with what it means and what to do when it goes wrong; above them
// what is wrong, in which run, and what to do.

// Their limits are the same in every run, and always in the picture.
const SHARED_LIMITS = ['truncated', 'interrupted', 'repetitive', 'failed'];

function healthSection() {
  const body = section('health', 'Health');
  const charts = [];
  RUNS.forEach((run) =>
    run.health.charts.forEach((chart) => {
      if (!charts.some((other) => other.key === chart.key)) charts.push(chart);
    }),
  );
  if (!charts.length) {
    body.append(make('p', { class: 'none', text: 'No update has been made yet.' }));
    return body;
  }
  if (RUNS.length > 1) {
    body.append(
      make(
        'ul',
        { class: 'legend' },
        ...RUNS.map((run, at) => make('li', {}, swatch(runColour(at)), make('span', { text: run.name }))),
      ),
    );
  }
  const alarms = alarmList();
  if (alarms) body.append(alarms);
  const grid = make('div', { class: 'grid' });
  for (const chart of charts) {
    grid.append(healthCard(chart));
    if (chart.key === 'lag') grid.append(stalenessCard(chart.wrong));
  }
  body.append(grid);
  const merged = RUNS.filter((run) => run.health.each > 1);
  if (merged.length) {
    body.append(
      make('p', {
        class: 'note',
        text:
          `Each point is the mean of ${merged.map((run) => run.health.each).join(', ')} updates, ` +
          'the band their least and most.',
      }),
    );
  }
  return body;
}

// What is wrong, each with its run and what to do.
function alarmList() {
  const items = RUNS.flatMap((run) =>
    run.health.alarms.map((alarm) =>
      make(
        'li',
        { class: alarm.loud ? null : 'warning' },
        make('span', { class: 'says', text: `${run.name}${alarm.loud ? '' : ', warning'}: ${alarm.message}.` }),
        make('span', { class: 'advice', text: `What to do: ${alarm.advice}.` }),
      ),
    ),
  );
  return items.length ? make('ul', { class: 'alarms', 'aria-label': 'Alarms' }, ...items) : null;
}

function healthCard(first) {
  const form = FORMS[first.form];
  const mine = RUNS.map((run, at) => [run, at, run.health.charts.find((chart) => chart.key === first.key)]).filter(
    (part) => part[2] && part[2].series.length,
  );
  if (!mine.length) {
    return make(
      'article',
      { class: 'card' },
      make('h3', { text: first.title }),
      make('p', { class: 'what', text: first.what }),
      make('p', { class: 'none', text: 'Not recorded by any update.' }),
      meaning(first.means, first.wrong),
    );
  }
  const series = [];
  for (const [run, at, chart] of mine) {
    chart.series.forEach((one, place) => {
      const second = place > 0;
      if (second && RUNS.length > 1) return; // a second line for each run would be too many
      const name = [RUNS.length > 1 ? run.name : '', one.name].filter(Boolean).join(' ');
      series.push({
        name,
        colour: second ? 'soft' : runColour(at),
        dash: second ? [3, 3] : runDash(at),
        width: second ? 1.2 : 1.6,
        x: run.health.step,
        y: one.mean,
        sparse: first.key === 'loss', // evaluations are in few of the rows: a line joins them
        low: one.low,
        high: one.high,
      });
    });
  }
  const over = mine.some(
    ([run, , chart]) =>
      chart.lines.some((line) => line.over) || run.health.alarms.some((alarm) => alarm.chart === first.key),
  );
  const lines =
    mine.length === 1 || SHARED_LIMITS.includes(first.key) ? mine[0][2].lines : first.lines.filter((line) => line.bound);
  const range = healthRange(first, series, lines);
  const shown = lines.filter((line) => line.value >= range[0] && line.value <= range[1]);
  const hidden = lines.filter((line) => !shown.includes(line));
  const latest = mine.map(([, , chart]) => form(chart.latest)).join(', ');
  const host = make('div');
  const card = make(
    'article',
    { class: over ? 'card over' : 'card' },
    make('div', { class: 'line' }, make('h3', { text: first.title }), make('span', { class: 'latest', text: latest })),
    make('p', { class: 'what', text: first.what }),
    host,
  );
  const notes = [];
  const without = RUNS.filter((run) => !mine.some(([other]) => other === run));
  if (without.length) notes.push(`not recorded by ${without.map((run) => run.name).join(', ')}`);
  if (over) notes.push('past its limit');
  if (hidden.length)
    notes.push(
      `limit${hidden.length > 1 ? 's' : ''} outside the picture: ${hidden.map((line) => line.label).join(', ')}`,
    );
  if (notes.length) card.append(make('p', { class: over ? 'flag' : 'what', text: notes.join('; ') }));
  card.append(
    meaning(first.means, first.wrong),
    tableOf(first.title, ['update', ...series.map((one) => one.name || first.title)], () => healthRows(series, form)),
  );
  card.drawn = () =>
    drawChart(host, {
      label: `${first.title}, ${first.what}, against updates: latest ${latest}${over ? ', past its limit' : ''}.`,
      height: 150,
      x: { ...AXES.step, range: stepRange(series) },
      y: { form, ticks: evenTicks(form), range },
      series,
      lines: shown.map((line) => ({ ...line, colour: line.bound ? 'muted' : 'alarm' })),
      stops: series.length ? series[0].x : [],
    });
  return card;
}

const meaning = (means, wrong) =>
  make('p', { class: 'means', text: `${means} ` }, make('span', { text: `When it goes wrong: ${wrong}.` }));

// How old the tokens of the last updates were: bars, or a line for each of several runs.
function stalenessCard(wrong) {
  const mine = RUNS.map((run, at) => [run, at, run.health.staleness]).filter((part) => part[2].lag.length);
  const title = 'Staleness, histogram';
  const what = `share of the sampled tokens, last ${RUNS[0].health.recent} updates`;
  const head = [make('h3', { text: title }), make('p', { class: 'what', text: what })];
  const under = meaning('One or two bars: the two sides keep pace.', wrong);
  if (!mine.length)
    return make('article', { class: 'card' }, ...head, make('p', { class: 'none', text: 'Not recorded.' }), under);
  const most = 1.1 * Math.max(...mine.flatMap(([, , one]) => one.share));
  const last = Math.max(...mine.flatMap(([, , one]) => one.lag));
  const bars = mine.length === 1 ? mine[0][2] : null;
  const form = (value) => `staleness ${Math.round(value)}`;
  const series = mine.map(([run, at, one]) => ({
    name: RUNS.length > 1 ? run.name : '',
    colour: runColour(at),
    dash: runDash(at),
    width: 1.6,
    x: one.lag,
    y: one.share,
  }));
  const host = make('div');
  const said = mine.map(([run, , one]) => `${run.name}: ${one.lag.map((lag, at) => `${lag} ${percent(one.share[at])}`).join(', ')}`);
  const card = make('article', { class: 'card' }, ...head, host, under);
  card.append(
    tableOf(title, ['staleness', ...series.map((one) => one.name || 'share')], () => healthRows(series, percent)),
  );
  card.drawn = () =>
    drawChart(host, {
      label: `${title}, ${what}. ${said.join('; ')}.`,
      height: 150,
      x: { title: 'updates', form, ticks: (value) => (value % 1 ? '' : String(value)), range: [-0.5, last + 0.5] },
      y: { form: percent, ticks: evenTicks(percent), range: [0, most] },
      series: bars ? [] : series,
      stacks: bars && bars.lag.map((lag, at) => ({ start: lag - 0.4, end: lag + 0.4, parts: [bars.share[at] / most] })),
      colours: mine.map(([, at]) => runColour(at)),
      stops: Array.from({ length: last + 1 }, (_, lag) => lag),
      say: bars && ((x) => `${form(x)}:  ${percent(bars.share[closest(bars.lag, x)])}`),
    });
  return card;
}

// Lines that the data are far from are left out of the picture, but those of some shares and of lag are always there.
function healthRange(chart, series, lines) {
  const values = series.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || [])]).filter(known);
  let least = Math.min(...values);
  let most = Math.max(...values);
  if (chart.form !== 'number' || least >= 0) least = Math.min(0, least);
  if (chart.key === 'reward') [least, most] = [Math.min(least, 0), Math.max(most, 0)];
  if (chart.key.startsWith('effective_sample_size')) least = Math.min(...values);
  for (const line of lines) {
    const near = most > 0.3 * line.value && line.value <= 2.5 * Math.max(most, 1e-12);
    if (near || chart.key === 'lag' || SHARED_LIMITS.includes(chart.key))
      [least, most] = [Math.min(least, line.value), Math.max(most, line.value)];
  }
  const room = (most - least) * 0.12 || Math.abs(most) * 0.1 || (chart.form === 'share' ? 0.01 : 1);
  return [least === 0 ? 0 : least - room, most + room];
}

function stepRange(series) {
  const steps = series.flatMap((one) => [one.x[0], one.x.at(-1)]);
  return [Math.min(...steps), Math.max(Math.min(...steps) + 1, ...steps)];
}

function healthRows(series, form) {
  const steps = [...new Set(series.flatMap((one) => one.x))].sort((one, other) => one - other);
  const places = series.map((one) => new Map(one.x.map((step, at) => [step, at])));
  return steps.map((step) => [
    step,
    ...series.map((one, at) => (places[at].has(step) ? form(one.y[places[at].get(step)]) : MISSING)),
  ]);
}
