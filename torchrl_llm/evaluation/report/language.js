// Part of view.js that shows a run of language-space training: policies, advice, credit and episodes.
const words = (diff) => el("p", {class: "policy"}, ...diff.map(([mark, text]) =>
  el(mark === "-" ? "del" : mark === "+" ? "ins" : "span", {}, text)));
const said = (name, text, kind) => el("div", {class: "block " + (kind || "")},
  el("div", {class: "label"}, name), el("div", {class: "text"}, text));

function episodeView(episode, number) {
  const question = (episode.task.find(([key]) => key !== "context") || ["", ""])[1];
  const reward = el("b", {}, episode.reward === null ? "–" : show(episode.reward));
  return el("details", {class: "episode"}, el("summary", {}, reward, " ", el("span", {}, question || "episode " + number)),
    episode.error ? el("p", {class: "callout bad"}, episode.error) : null,
    el("p", {class: "task"}, ...episode.task.map(([key, value]) => el("span", {}, el("b", {}, key + " "), value))),
    ...episode.turns.flatMap(([agent, seen, did]) => [said(agent + " sees", seen), said(agent + " answers", did, "own")]),
    ...episode.credit.map(([agent, text]) => said("credit of " + agent, text, "credit")));
}

function iterationView(one, open) {
  const changed = one.agents.filter((agent) => agent.diff.length), advised = one.agents.filter((agent) => agent.advice);
  const told = !one.accepted ? "change refused" : changed.length ? counted(changed.length, "policy change") : "no change";
  return el("details", {class: "iteration card", open},
    el("summary", {}, el("b", {}, "Iteration " + one.number), ` reward ${one.reward === null ? "–" : show(one.reward)}, ${told}`),
    ...advised.map((agent) => said("advice to " + agent.name, agent.advice)),
    ...changed.map((agent) => el("div", {}, el("div", {class: "label"}, "policy of " + agent.name), words(agent.diff))),
    el("div", {class: "label"}, counted(one.episodes.length, "episode")),
    ...one.episodes.map(episodeView));
}

function drawLanguage({agents, iterations}) {
  $("language").hidden = false;
  document.querySelector("footer").hidden = true;
  $("policies").append(...agents.map(({name, diff}) => el("div", {class: "card"}, el("div", {class: "name"}, name), words(diff))));
  $("iterations").append(...iterations.map((one, at) => iterationView(one, at === 0)));
}
