// The reader: sampled rollouts by step and outcome, one at a time.

const OUTCOMES = { right: ['✓', 'Right'], wrong: ['✕', 'Wrong'], truncated: ['…', 'Truncated'] };
const FILTERS = [
  ['all', 'All'],
  ['right', 'Right'],
  ['wrong', 'Wrong'],
  ['truncated', 'Truncated'],
  ['interrupted', 'Interrupted'],
];

function readerSection() {
  const body = section('rollouts', 'Rollouts');
  const state = { run: RUNS[0], filter: 'all', step: 'all', at: 0, shading: 'probability', token: -1 };
  const inner = make('div');
  const pick = chooseRun('reader-run', (run) => {
    Object.assign(state, { run, filter: 'all', step: 'all', at: 0 });
    buildReader(inner, state);
  });
  if (pick) body.append(pick);
  body.append(inner);
  buildReader(inner, state);
  return body;
}

function buildReader(inner, state) {
  const { samples, written, shown, whole } = state.run.rollouts;
  if (!samples.length) {
    inner.replaceChildren(
      make('p', { class: 'none', text: 'No completion has been saved yet (config.telemetry.samples_every).' }),
    );
    return;
  }
  const parts = {
    filters: make('div', { class: 'filters', role: 'group', 'aria-label': 'Outcome' }),
    count: make('p', { class: 'count', role: 'status' }),
    map: make('div', { class: 'map', role: 'radiogroup', 'aria-label': 'Sampled rollouts, a row for each update' }),
    one: make('article', { class: 'one' }),
    info: make('p', { class: 'token', role: 'status', text: ' ' }),
  };
  const chosen = () =>
    samples.filter((sample) => passes(sample, state.filter) && (state.step === 'all' || sample.step === state.step));
  const refresh = (focus = false) => {
    const list = chosen();
    state.at = Math.min(Math.max(0, state.at), Math.max(0, list.length - 1));
    drawFilters(
      parts.filters,
      samples.filter((sample) => state.step === 'all' || sample.step === state.step),
      state,
      (filter) => {
        keep(
          list,
          state,
          () => {
            state.filter = filter;
          },
          chosen,
        );
        refresh();
      },
    );
    drawMap(parts.map, list, state, (at) => {
      state.at = at;
      refresh(true);
    });
    parts.count.textContent = list.length ? `${state.at + 1} of ${list.length}` : 'none of this kind';
    previous.disabled = state.at === 0;
    next.disabled = state.at >= list.length - 1;
    drawOne(parts, list[state.at], state);
    if (focus) parts.map.querySelector('[aria-checked="true"]').focus({ preventScroll: false });
  };
  const go = (by) => {
    const list = chosen();
    const to = Math.min(list.length - 1, Math.max(0, state.at + by));
    if (to !== state.at) {
      state.at = to;
      refresh();
    }
  };

  const previous = make('button', { type: 'button', class: 'turn', text: '← Previous', onclick: () => go(-1) });
  const next = make('button', { type: 'button', class: 'turn', text: 'Next →', onclick: () => go(1) });
  const steps = [...new Set(samples.map((sample) => sample.step))];
  const select = make(
    'select',
    { id: 'reader-step' },
    make('option', { value: 'all', text: 'all' }),
    ...steps.map((step) => make('option', { value: step, text: String(step) })),
  );
  select.addEventListener('change', () => {
    const list = chosen();
    keep(
      list,
      state,
      () => {
        state.step = select.value === 'all' ? 'all' : Number(select.value);
      },
      chosen,
    );
    refresh();
  });
  const shading = choice('shading', 'Shade', SHADINGS, state.shading, (value) => {
    state.shading = value;
    ramp.hidden = value !== 'probability';
    refresh();
  });
  const ramp = shadeLegend();
  const notes = [];
  if (shown < written)
    notes.push(
      `${shown} of the ${written} updates with samples are in this page, evenly spread; ` +
        'the others are in the run folder',
    );
  if (!whole) notes.push('of an update with very many or very long ones, only the first');
  notes.push('arrow keys go through the squares, and token by token through a text that has the focus');
  const reader = make(
    'div',
    { class: 'card reader' },
    make(
      'div',
      { class: 'controls' },
      parts.filters,
      make('div', { class: 'pick' }, make('label', { for: 'reader-step', text: 'Update' }), select),
      shading,
      ramp,
    ),
    make(
      'div',
      { class: 'two' },
      make('div', { class: 'side' }, parts.map),
      make(
        'div',
        { class: 'main' },
        make('div', { class: 'turns' }, previous, parts.count, next),
        parts.one,
        parts.info,
      ),
    ),
    make('p', { class: 'note', text: `${notes.join('; ')}.` }),
  );
  reader.addEventListener('keydown', (event) => {
    if (
      event.defaultPrevented ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      event.target.closest('input, select, .text')
    )
      return;
    if (event.key === 'ArrowLeft') go(-1);
    else if (event.key === 'ArrowRight') go(1);
    else return;
    event.preventDefault();
  });
  inner.replaceChildren(reader);
  refresh();
}

function passes(sample, filter) {
  return filter === 'all' || (filter === 'interrupted' ? sample.interrupted : sample.outcome === filter);
}

// The sample that is read stays, where the new filter has it.
function keep(list, state, change, chosen) {
  const current = list[state.at];
  change();
  state.at = Math.max(0, chosen().indexOf(current));
}

function drawFilters(host, samples, state, changed) {
  const had = host.contains(document.activeElement) ? document.activeElement.dataset.filter : null;
  host.replaceChildren(
    ...FILTERS.map(([name, text]) => {
      const count = samples.filter((sample) => passes(sample, name)).length;
      const sign = OUTCOMES[name]
        ? make('span', { class: `sign ${name}`, 'aria-hidden': 'true', text: OUTCOMES[name][0] })
        : null;
      return make(
        'button',
        {
          type: 'button',
          'data-filter': name,
          'aria-pressed': String(state.filter === name),
          onclick: () => changed(name),
        },
        sign,
        make('span', { text }),
        make('span', { class: 'number', text: String(count) }),
      );
    }),
  );
  if (had) host.querySelector(`[data-filter="${had}"]`).focus();
}

// A row of squares for each step; one tab stop, arrows within.
function drawMap(host, list, state, changed) {
  const top = host.scrollTop;
  const rows = new Map();
  list.forEach((sample, at) => {
    const [sign, word] = OUTCOMES[sample.outcome];
    const square = make('button', {
      type: 'button',
      role: 'radio',
      class: `square ${sample.outcome}`,
      'data-at': at,
      tabindex: at === state.at ? '0' : '-1',
      'aria-checked': String(at === state.at),
      'aria-label':
        `update ${sample.step}, group ${sample.group}: ${word.toLowerCase()}` +
        (sample.branch[1] > 1 ? `, branch ${sample.branch.join(' of ')}` : '') +
        (sample.interrupted ? ', interrupted' : ''),
      text: sign,
      onclick: () => changed(at),
    });
    if (!rows.has(sample.step)) rows.set(sample.step, []);
    rows.get(sample.step).push(square);
  });
  const grid = [...rows.values()];
  host.replaceChildren(
    ...[...rows].map(([step, squares]) =>
      make(
        'div',
        { class: 'row' },
        make('span', { class: 'step', text: String(step), 'aria-hidden': 'true' }),
        make('div', { class: 'squares' }, ...squares),
      ),
    ),
  );
  host.scrollTop = top;
  const checked = host.querySelector('[aria-checked="true"]');
  if (checked) showInside(host, checked);
  host.onkeydown = (event) => {
    const row = grid.findIndex((squares) => squares.includes(document.activeElement));
    if (row < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const column = grid[row].indexOf(document.activeElement);
    const at = Number(document.activeElement.dataset.at);
    const other = (to) => {
      const squares = grid[to];
      return squares ? Number(squares[Math.min(column, squares.length - 1)].dataset.at) : at;
    };
    const moves = {
      ArrowRight: () => at + 1,
      ArrowLeft: () => at - 1,
      ArrowDown: () => other(row + 1),
      ArrowUp: () => other(row - 1),
      Home: () => 0,
      End: () => list.length - 1,
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    const to = Math.min(list.length - 1, Math.max(0, moves[event.key]()));
    if (to !== at) changed(to);
  };
}

// Scrolls the map, never the page.
function showInside(host, element) {
  const [outer, inner] = [host.getBoundingClientRect(), element.getBoundingClientRect()];
  if (inner.top < outer.top) host.scrollTop -= outer.top - inner.top + 4;
  else if (inner.bottom > outer.bottom) host.scrollTop += inner.bottom - outer.bottom + 4;
}

function drawOne(parts, sample, state) {
  parts.info.textContent = ' ';
  state.token = -1;
  if (!sample) {
    parts.one.replaceChildren(make('p', { class: 'none', text: 'No sampled rollout is of this kind.' }));
    return;
  }
  const [sign, word] = OUTCOMES[sample.outcome];
  const lags = sample.versions.map(([step]) => sample.step - 1 - step);
  const lag = Math.min(...lags) === Math.max(...lags) ? `${lags[0]}` : `${Math.min(...lags)} to ${Math.max(...lags)}`;
  const facts = [
    ['Reward', signed(sample.reward, 0)],
    ['Correct answer', sample.expected],
    ['Finish reason', sample.finish === 'length' ? 'token budget' : sample.finish],
    ['Tokens', String(sample.tokens)],
    ['Staleness', lags.length ? lag : MISSING],
    ['Update', String(sample.step)],
    ['Group', `${sample.group}, completion ${sample.index}`],
  ];
  if (sample.branch[1] > 1) facts.push(['Branch', sample.branch.join(' of ')]);
  if (sample.task) facts.push(['Task', sample.task]);
  const head = make(
    'header',
    {},
    make(
      'span',
      { class: `verdict ${sample.outcome}` },
      make('span', { 'aria-hidden': 'true', text: sign }),
      make('span', { text: word }),
    ),
    sample.interrupted ? make('span', { class: 'verdict interrupted', text: 'Interrupted' }) : null,
    make(
      'dl',
      { class: 'facts' },
      ...facts.map(([name, value]) => make('div', {}, make('dt', { text: name }), make('dd', { text: value }))),
    ),
  );
  const blocks = [
    textBlock(
      'Prompt',
      (host) => {
        host.textContent = sample.prompt;
      },
      sample.prompt_left_out ? `${sample.prompt_left_out} characters are left out of the middle` : '',
    ),
  ];
  const thinking = sample.answer_from > 0;
  const block = (title, from, to, note) =>
    textBlock(
      title,
      (host) => {
        drawTokens(host, sample, from, to, state.shading);
        inspect(host, sample, from, to, parts.info, state);
      },
      note,
    );
  if (thinking) blocks.push(block('Thinking', 0, sample.answer_from, ''));
  const lost = sample.left_out[2] ? `${sample.left_out[2]} characters are left out of the middle` : '';
  if (sample.answer_from < sample.text.length)
    blocks.push(block(thinking ? 'Answer' : 'Completion', sample.answer_from, sample.text.length, lost));
  else blocks.push(make('p', { class: 'what', text: 'The thinking never ended: there is no answer.' }));
  if (!sample.pieces)
    blocks.push(
      make('p', {
        class: 'what',
        text: 'This sample does not hold the text of each token, so nothing is shaded.',
      }),
    );
  parts.one.replaceChildren(head, versionBar(sample), ...blocks);
}

function textBlock(title, fill, note) {
  const host = make('div', { class: 'text', tabindex: '0', role: 'group', 'aria-label': title });
  fill(host);
  return make(
    'div',
    { class: 'block' },
    make('h4', { text: title }),
    host,
    note ? make('p', { class: 'what', text: note }) : null,
  );
}

// What is under the pointer, or under the arrow keys while the text has the focus.
function inspect(host, sample, from, to, info, state) {
  const mark = (at) => {
    for (const other of host.querySelectorAll('.marked')) other.classList.remove('marked');
    const token = at < 0 ? null : host.querySelector(`[data-at="${at}"]`);
    if (token) token.classList.add('marked');
    info.textContent = token ? sayToken(sample, at) : ' ';
    return token;
  };
  host.addEventListener('pointerover', (event) => {
    const token = event.target.closest('.t');
    if (token) mark(Number(token.dataset.at));
  });
  host.addEventListener('pointerleave', () => mark(-1));
  host.addEventListener('blur', () => {
    state.token = -1;
    mark(-1);
  });
  host.addEventListener('keydown', (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    state.token = state.token < 0 ? from : Math.min(to - 1, Math.max(from, state.token + by));
    const token = mark(state.token);
    if (token) showInside(host, token);
  });
}
