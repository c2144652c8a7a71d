// A completion as text: each token shaded, versions marked where they change, what was forced set apart.

const SHADES = [0.05, 0.15, 0.35, 0.7, 1.2, 2, 3, 4.5, 6.5]; // nats: a token's class is how many of them it is beyond
const SHADINGS = [
  ['probability', 'Probability'],
  ['version', 'Version'],
  ['none', 'None'],
];

function shadeOf(logprob) {
  return SHADES.filter((nats) => -logprob > nats).length;
}

// The version of each span, from [version, start, end].
function versionAt(sample, at) {
  const found = sample.steps.find(([, start, end]) => at >= start && at < end);
  return found ? found[0] : null;
}

// Spans [from, to) of a sample into `host`. shading: one of SHADINGS.
function drawTokens(host, sample, from, to, shading) {
  const [gap, lost] = sample.left_out;
  const versions = new Map(sample.steps.map(([version], index) => [version, index]));
  let inside = null; // the element that forced spans go into
  let why = ''; // of what kind they are
  const pieces = [];
  for (let at = from; at < to; at += 1) {
    if (lost && at === gap) pieces.push(make('span', { class: 'gap', text: `${lost} tokens are left out here` }));
    const forced = sample.forced.find(([start, end]) => at >= start && at < end);
    const begins = sample.steps.find(([version, start]) => start === at && version !== null);
    if (begins)
      pieces.push(
        make('span', { class: 'version', text: `v${begins[0]}`, 'aria-label': `version ${begins[0]} from here` }),
      );
    const logprob = sample.logprob[at];
    const classes = ['t'];
    if (shading === 'probability' && known(logprob)) classes.push(`p${shadeOf(logprob)}`);
    if (shading === 'version' && sample.pieces) classes.push(`w${versions.get(versionAt(sample, at)) % 6}`);
    const token = make('span', { class: classes.join(' '), 'data-at': at, text: sample.text[at] });
    if (!forced) inside = null;
    else if (!inside || why !== forced[2]) {
      why = forced[2];
      inside = make('span', { class: 'forced' }, make('span', { class: 'tag', text: why }));
      pieces.push(inside);
    }
    if (inside) inside.append(token);
    else pieces.push(token);
  }
  host.replaceChildren(...pieces);
}

// What there is to say of one span.
function sayToken(sample, at) {
  const text = JSON.stringify(sample.text[at]);
  if (!sample.pieces) return text;
  const ids = sample.ids[at];
  const logprob = sample.logprob[at];
  const version = versionAt(sample, at);
  const parts = [text, `${ids.length > 1 ? 'tokens' : 'token'} ${ids.join(' ')}`];
  if (known(logprob)) parts.push(`log-prob ${decimals(logprob)}`, `probability ${plain(Math.exp(logprob))}`);
  else parts.push('forced, not sampled');
  if (version !== null) parts.push(`version ${version}, staleness ${sample.step - 1 - version}`);
  return parts.join('  ·  ');
}

function shadeLegend() {
  const boxes = [...SHADES, null].map((_, level) => make('span', { class: `shade p${level}` }));
  return make(
    'div',
    { class: 'shades' },
    make('span', { text: 'likely' }),
    make('span', { class: 'ramp', 'aria-hidden': 'true' }, ...boxes),
    make('span', { text: 'unlikely' }),
  );
}

// The share of tokens that each version sampled, as a bar.
function versionBar(sample) {
  const total = sample.tokens || 1;
  const said = sample.versions.map(([step, start, end]) => `version ${step}: tokens ${start} to ${end}`);
  const bar = make('div', {
    class: 'versions',
    role: 'img',
    'aria-label': `Sampled by ${said.join(', ')}`,
  });
  sample.versions.forEach(([step, start, end], index) => {
    const part = make('span', { class: `w${index % 6}`, text: `v${step}` });
    part.style.flexGrow = String((end - start) / total);
    bar.append(part);
  });
  return bar;
}
