// Small charts of the updates with their limits; above them what is wrong, in which run, and what to do.

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
  for (const chart of charts) grid.append(healthCard(chart));
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
        {},
        make('span', { class: 'says', text: `${run.name}: ${alarm.says}.` }),
        make('span', { class: 'advice', text: `What to do: ${alarm.advice}.` }),
      ),
    ),
  );
  return items.length ? make('ul', { class: 'alarms', 'aria-label': 'Alarms' }, ...items) : null;
}

function healthCard(first) {
  const form = FORMS[first.form];
  const mine = RUNS.map((run, at) => [run, at, run.health.charts.find((chart) => chart.key === first.key)]).filter(
    (part) => part[2],
  );
  const series = [];
  for (const [run, at, chart] of mine) {
    chart.series.forEach((one, place) => {
      const second = place > 0;
      if (second && mine.length > 1) return; // a second line for each run would be too many
      const name = [mine.length > 1 ? run.name : '', one.name].filter(Boolean).join(' ');
      series.push({
        name,
        colour: second ? 'soft' : mine.length > 1 ? runColour(at) : 'c0',
        dash: second ? [3, 3] : runDash(at),
        width: second ? 1.2 : 1.6,
        x: run.health.step,
        y: one.mean,
        low: one.low,
        high: one.high,
      });
    });
  }
  const over = mine.some(
    ([run, , chart]) =>
      chart.lines.some((line) => line.over) || run.health.alarms.some((alarm) => alarm.chart === first.key),
  );
  const lines = mine.length === 1 || first.key === 'truncated' ? first.lines : first.lines.filter((line) => line.bound);
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
  if (over) notes.push('past its limit');
  if (hidden.length)
    notes.push(
      `limit${hidden.length > 1 ? 's' : ''} outside the picture: ${hidden.map((line) => line.label).join(', ')}`,
    );
  if (notes.length) card.append(make('p', { class: over ? 'flag' : 'what', text: notes.join('; ') }));
  card.append(
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

// Lines that the data are far from are left out of the picture, but those of truncation and lag are always there.
function healthRange(chart, series, lines) {
  const values = series.flatMap((one) => [...one.y, ...(one.low || []), ...(one.high || [])]).filter(known);
  let least = Math.min(...values);
  let most = Math.max(...values);
  if (chart.form !== 'number' || least >= 0) least = Math.min(0, least);
  if (chart.key === 'reward') [least, most] = [Math.min(least, 0), Math.max(most, 0)];
  if (chart.key === 'effective_sample_size') least = Math.min(...values);
  for (const line of lines) {
    const near = most > 0.3 * line.value && line.value <= 2.5 * Math.max(most, 1e-12);
    if (near || ['truncated', 'lag'].includes(chart.key))
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
