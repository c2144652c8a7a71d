// Waits along the run, and what the devices' hours went into.

const SIDES = {
  trainer: {
    title: 'Trainer',
    parts: [
      ['update', 'busy'],
      ['waiting for rollouts', 'idle'],
      ['evaluating', 'evaluation'],
      ['set-up', 'setup'],
      ['other', 'other'],
      ['stalled', 'stalled'],
    ],
  },
  generators: {
    title: 'Generators',
    parts: [
      ['sampling', 'busy'],
      ['idle', 'idle'],
      ['evaluating', 'evaluation'],
      ['set-up', 'setup'],
      ['stalled', 'stalled'],
    ],
  },
};

function timeSection() {
  const body = section('time', 'Who waited for whom');
  const inner = make('div');
  const pick = chooseRun('time-run', (run) => drawTime(inner, run));
  if (pick) body.append(pick);
  body.append(inner);
  body.drawn = () => drawTime(inner, RUNS[0]);
  return body;
}

function drawTime(body, run) {
  const { intervals, names, other_names: otherNames, other_seconds: otherSeconds, each, named } = run.time;
  if (!intervals.length) {
    body.replaceChildren(make('p', { class: 'none', text: 'No update has been made yet.' }));
    return;
  }
  const end = intervals.at(-1).end;
  const [unit, scale] =
    end < 200 ? ['seconds', 1] : end < 12000 ? ['minutes', 60] : end < 4e5 ? ['hours', 3600] : ['days', 86400];
  const cards = [];
  const later = [];
  for (const side of ['trainer', 'generators']) {
    const { title, parts } = SIDES[side];
    const host = make('div');
    const mean = meanShares(intervals, side);
    const shares = parts.map(([name], at) => `${name} ${percent(mean[at])}`);
    const marks = parts
      .map(([name, shade], at) =>
        mean[at] < 0.0005
          ? null
          : make('li', {}, swatch(shade, 'box'), make('span', { text: `${name} ${percent(mean[at])}` })),
      )
      .filter(Boolean);
    cards.push(
      make(
        'div',
        { class: 'lane' },
        make('div', { class: 'line' }, make('h3', { text: title }), make('ul', { class: 'legend' }, ...marks)),
        host,
      ),
    );
    later.push(() =>
      drawChart(host, {
        label: `${title}, shares of the time along the run: ${shares.join(', ')}.`,
        height: 120,
        x: { title: unit, ticks: plain, form: (value) => `${plain(value)} ${unit}`, range: [0, end / scale] },
        y: { form: percent, ticks: evenTicks(percent), range: [0, 1] },
        series: [],
        stops: intervals.map((one) => (one.start + one.end) / 2 / scale),
        stacks: intervals.map((one) => ({
          start: one.start / scale,
          end: one.end / scale,
          parts: one[side].map((value) => value || 0),
        })),
        colours: parts.map(([, shade]) => shade),
        lines: intervals
          .filter((one) => known(one.pause))
          .map((one) => ({ at: one.start / scale, label: `restarted after ${duration(one.pause)}` })),
        rest: `${unit} of running; pauses between two starts are left out`,
        say: (x) => sayTime(intervals, side, x * scale),
      }),
    );
  }
  const [trainer, generators] = [meanShares(intervals, 'trainer'), meanShares(intervals, 'generators')];
  const slower =
    generators[1] > trainer[1]
      ? 'the generators had no request they were allowed to start: the trainer is the slower side'
      : 'the trainer waited for rollouts: the generators are the slower side';
  const said = [
    make('p', {
      text:
        `The trainer waited ${percent(trainer[1])} of the time, ` +
        `generators were idle ${percent(generators[1])} of theirs: ${slower}.`,
    }),
  ];
  if (names.length) {
    const rows = names.map(([name, seconds]) => [name, duration(seconds)]);
    if (otherNames) rows.push([`${otherNames} others`, duration(otherSeconds)]);
    said.push(
      make('h3', { text: 'Whom the trainer waited for' }),
      make('p', { class: 'what', text: 'who the oldest missing group of completions was expected from' }),
      table(['name', 'time'], rows, 'Whom the trainer waited for'),
    );
  } else
    said.push(
      make('p', {
        class: 'what',
        text: named ? 'It never waited.' : 'The metrics of this run do not say for whom it waited.',
      }),
    );
  if (each > 1) said.push(make('p', { class: 'note', text: `Each bar is ${each} updates.` }));
  const numbers = tableOf(
    'Shares of the time',
    [
      'update',
      'until',
      ...['trainer', 'generators'].flatMap((side) => SIDES[side].parts.map(([name]) => `${side}: ${name}`)),
      'waited most for',
    ],
    () =>
      intervals.map((one) => [
        one.step,
        duration(one.end),
        ...one.trainer.map((value) => percent(value)),
        ...one.generators.map((value) => percent(value)),
        one.waited_for ? `${one.waited_for[0]} (${duration(one.waited_for[1])})` : MISSING,
      ]),
  );
  body.replaceChildren(
    make('div', { class: 'card' }, ...cards, make('div', { class: 'said' }, ...said), numbers),
    costs(run),
  );
  later.forEach((draw) => draw());
}

function meanShares(intervals, side) {
  const total = intervals.reduce((sum, one) => sum + (one.end - one.start), 0) || 1;
  return SIDES[side].parts.map(
    (_, at) => intervals.reduce((sum, one) => sum + (one[side][at] || 0) * (one.end - one.start), 0) / total,
  );
}

function sayTime(intervals, side, seconds) {
  const one = intervals.find((other) => seconds <= other.end) || intervals.at(-1);
  const shares = SIDES[side].parts.map(([name], at) => [name, one[side][at]]).filter(([, value]) => value >= 0.005);
  const whom =
    side === 'trainer' && one.waited_for
      ? `; waited most for ${one.waited_for[0]} (${duration(one.waited_for[1])})`
      : '';
  return `up to update ${one.step}: ${shares.map(([name, value]) => `${name} ${percent(value, 0)}`).join(', ')}${whom}`;
}

// ---- device-hours by role

function costs(run) {
  const { hours } = run.totals;
  const kinds = [
    ['busy', 'busy'],
    ['idle', 'idle'],
    ['evaluation', 'evaluation'],
    ['setup', 'set-up'],
    ['stalled', 'stalled'],
  ];
  const most =
    Math.max(...Object.values(hours).map((parts) => kinds.reduce((sum, [kind]) => sum + parts[kind], 0))) || 1;
  const sides = [
    ['trainer', 'Trainer'],
    ['generator', 'Generators'],
  ];
  const bars = sides.map(([side, title]) => {
    const bar = make('div', { class: 'stack', 'aria-hidden': 'true' });
    for (const [kind] of kinds) {
      const part = make('span', { class: kind });
      part.style.width = `${(100 * hours[side][kind]) / most}%`;
      bar.append(part);
    }
    return make('div', { class: 'role' }, make('span', { class: 'name', text: title }), bar);
  });
  const rows = sides.map(([side, title]) => {
    const values = kinds.map(([kind]) => hours[side][kind]);
    return [title, ...values.map(plain), plain(values.reduce((sum, value) => sum + value, 0))];
  });
  const legend = kinds.map(([kind, name]) => make('li', {}, swatch(kind, 'box'), make('span', { text: name })));
  const { totals } = run;
  const text =
    `Busy and idle of both sides are ${plain(totals.device_hours)} device-hours, ` +
    `in which the model did ${flops(totals.model_flops)}. ` +
    `${short(totals.sampled_tokens)} tokens sampled, ${short(totals.trained_tokens)} trained on, ` +
    `${short(totals.evaluation_tokens)} for evaluations.`;
  return make(
    'div',
    { class: 'card' },
    make('h3', { text: 'Device-hours by role' }),
    make('ul', { class: 'legend' }, ...legend),
    ...bars,
    table(['device-hours', ...kinds.map(([, name]) => name), 'all'], rows, 'Device-hours by role'),
    make('p', { class: 'what', text }),
  );
}
