// Elements, numbers, colours. Whatever comes from a run becomes text through textContent, here and nowhere else.

const page = JSON.parse(document.getElementById('data').textContent);
const RUNS = page.runs;

// make('p', {class: 'x', text: 'y', 'aria-label': 'z', onclick: f}, child, ...): an element. Strings become text nodes.
function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'text') element.textContent = value;
    else if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// ---- numbers

const known = (value) => value !== null && value !== undefined;
const MISSING = '–';

function decimals(value, digits = 3) {
  return known(value) ? value.toFixed(digits).replace('-', '−') : MISSING;
}

function signed(value, digits = 3) {
  return known(value) ? (value < 0 ? '' : '+') + decimals(value, digits) : MISSING;
}

// 1234567 -> 1.23M, 0.00012 -> 0.00012, 2.9e12 -> 2.9T
function short(value) {
  if (!known(value)) return MISSING;
  const size = Math.abs(value);
  for (const [scale, letter] of [
    [1e21, 'Z'],
    [1e18, 'E'],
    [1e15, 'P'],
    [1e12, 'T'],
    [1e9, 'G'],
    [1e6, 'M'],
    [1e3, 'k'],
  ]) {
    if (size >= scale) return plain(value / scale) + letter;
  }
  return plain(value);
}

// 2.9e12 -> 2.9 TFLOP
function flops(value) {
  return known(value) ? short(value).replace(/[a-zA-Z]?$/, (letter) => ` ${letter}FLOP`) : MISSING;
}

// Three digits that matter, no exponent between 1e-4 and 1e4.
function plain(value) {
  if (!known(value)) return MISSING;
  if (value === 0) return '0';
  const size = Math.abs(value);
  const text = size >= 1e-4 && size < 1e4 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
  return text.replace('-', '−');
}

function percent(value, digits) {
  if (!known(value)) return MISSING;
  const size = Math.abs(100 * value);
  const whole = size === 0 || size === 100 || (size >= 10 && size < 99);
  const places = known(digits) ? digits : whole ? 0 : size >= 0.1 && size < 99 ? 1 : 2;
  return `${decimals(100 * value, places)} %`;
}

function duration(seconds) {
  if (!known(seconds)) return MISSING;
  if (seconds < 99.5) return `${plain(Number(seconds.toPrecision(2)))} s`;
  if (seconds < 5940) return `${Math.round(seconds / 60)} min`;
  if (seconds < 36e4) return `${plain(seconds / 3600)} h`;
  return `${plain(seconds / 86400)} days`;
}

function moment(seconds) {
  return new Date(1000 * seconds).toISOString().slice(0, 16).replace('T', ' ') + ' UTC';
}

const FORMS = { number: plain, share: percent, count: short };

// An axis' ticks, all with the digits that tell the closest two of them apart.
function evenTicks(form) {
  return (ticks) => {
    const factor = form === percent ? 100 : 1;
    const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) * factor : 1;
    if (form === short && step >= 1000) return ticks.map(short);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const places = digits > 4 || Number((step * 10 ** digits).toPrecision(6)) % 1 === 0 ? digits : digits + 1;
    return ticks.map((tick) => (form === percent ? percent(tick, places) : tick === 0 ? '0' : decimals(tick, places)));
  };
}

// ---- colours: the page's, in whatever theme it is in

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const runColour = (index) => `c${index % 8}`;
const runDash = (index) => [[], [8, 4], [2, 3], [8, 3, 2, 3]][Math.floor(index / 8) % 4];

function swatch(name, kind = 'line') {
  const mark = make('span', { class: `swatch ${kind}`, 'aria-hidden': 'true' });
  mark.style.setProperty('--mark', `var(--${name})`);
  return mark;
}

// ---- pieces that every section uses

function section(id, title, lead) {
  const heading = make('h2', { id: `${id}-title`, text: title });
  const body = make('section', { id, 'aria-labelledby': heading.id, tabindex: '-1' }, heading);
  if (lead) body.append(make('p', { class: 'lead', text: lead }));
  return body;
}

function table(columns, rows, caption) {
  const head = make('tr', {}, ...columns.map((name) => make('th', { scope: 'col', text: name })));
  const lines = rows.map((cells) => {
    const parts = cells.map((cell, at) =>
      cell instanceof Node
        ? make('td', {}, cell)
        : make(at ? 'td' : 'th', { scope: at ? null : 'row', text: String(cell) }),
    );
    return make('tr', {}, ...parts);
  });
  const drawn = make(
    'table',
    {},
    make('caption', { class: 'hidden', text: caption }),
    make('thead', {}, head),
    make('tbody', {}, ...lines),
  );
  return make('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption }, drawn);
}

// The same as a table, made when it is asked for.
function tableOf(caption, columns, rows) {
  const details = make('details', { class: 'numbers' }, make('summary', { text: 'As a table' }));
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1) details.append(table(columns, rows(), caption));
  });
  return details;
}

// A choice of one among [value, text], as radio buttons.
function choice(name, legend, options, chosen, changed) {
  const labels = options.map(([value, text]) => {
    const input = make('input', { type: 'radio', name, value, checked: value === chosen });
    input.addEventListener('change', () => changed(value));
    return make('label', {}, input, make('span', { text }));
  });
  return make('fieldset', { class: 'choice' }, make('legend', { text: legend }), ...labels);
}

function checkbox(text, checked, changed, mark) {
  const input = make('input', { type: 'checkbox', checked });
  input.addEventListener('change', () => changed(input.checked));
  return make('label', { class: 'check' }, input, mark || null, make('span', { text }));
}

function chooseRun(id, changed) {
  if (RUNS.length < 2) return null;
  const select = make(
    'select',
    { id },
    ...RUNS.map((run, at) => make('option', { value: String(at), text: run.name })),
  );
  select.addEventListener('change', () => changed(RUNS[Number(select.value)]));
  return make('div', { class: 'pick' }, make('label', { for: id, text: 'Run' }), select);
}
