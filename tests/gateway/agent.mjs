// An agent of one tool over /v1/chat/completions, with nothing but fetch: node agent.mjs BASE_URL QUESTION
// Prints the last answer. What the model calls is run, until it calls nothing.

const [base, question] = process.argv.slice(2);
const MOST_TURNS = 8;

const tools = [
  {
    type: "function",
    function: {
      name: "add",
      description: "Adds.",
      parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } },
    },
  },
];
const run = { add: ({ a, b }) => String(a + b) };

async function complete(messages) {
  const answer = await fetch(`${base}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: "Bearer any" },
    body: JSON.stringify({ model: "tiny", messages, tools }),
  });
  const body = await answer.json();
  if (!answer.ok) throw new Error(`${answer.status}: ${body.error.message}`);
  return body.choices[0].message;
}

const messages = [{ role: "user", content: question }];
for (let turn = 0; turn < MOST_TURNS; turn++) {
  const { content, tool_calls: calls = [] } = await complete(messages);
  if (!calls.length) {
    console.log(content);
    process.exit(0);
  }
  messages.push({ role: "assistant", content, tool_calls: calls });
  for (const { id, function: called } of calls) {
    messages.push({ role: "tool", tool_call_id: id, content: run[called.name](JSON.parse(called.arguments)) });
  }
}
throw new Error(`it still calls tools after ${MOST_TURNS} turns`);
