// Part of view.js that shows a run of language-space training: policies, advice, credit and episodes.
const words = (diff) => el("p", {class: "policy"}, ...diff.map(([mark, text]) =>
  el(mark === "-" ? "del" : mark === "+" ? "ins" : "span", {}, text)));
const said = (name, text, kind) => el("div", {class: "block " + (kind || "")},
  el("div", {class: "label"}, name), el("div", {class: "text"}, text));

function episodeView(episode, number, open) {
  const question = (episode.task.find(([key]) => key !== "context") || ["", ""])[1];
  const reward = el("b", {}, episode.reward === null ? "–" : show(episode.reward));
  return el("details", {class: "episode", open}, el("summary", {}, reward, " ", el("span", {}, question || "episode " + number)),
    episode.error ? el("p", {class: "callout bad"}, episode.error) : null,
    el("p", {class: "task"}, ...episode.task.map(([key, value]) => el("span", {}, el("b", {}, key + " "), value))),
    ...episode.turns.flatMap(([agent, seen, did]) => [said(agent + " sees", seen), said(agent + " answers", did, "own")]),
    ...episode.credit.map(([agent, text]) => said("credit of " + agent, text, "credit")));
}

function iterationView(one, open) {
  const changed = one.agents.filter((agent) => agent.diff.length);
  const told = !one.accepted ? "change refused" : changed.length ? counted(changed.length, "policy change") : "no change";
  return el("details", {class: "iteration card", open},
    el("summary", {}, el("b", {}, "Iteration " + one.number), ` reward ${one.reward === null ? "–" : show(one.reward)}, ${told}`),
    ...one.agents.flatMap(({name, advice, diff}) => [advice ? said("advice to " + name, advice) : null,
      diff.length ? el("div", {class: "block own"}, el("div", {class: "label"}, "policy of " + name), words(diff)) : null]),
    el("div", {class: "label"}, counted(one.episodes.length, "episode")),
    ...one.episodes.map((episode, at) => episodeView(episode, at, open && at === 0)));
}

function drawLanguage({agents, iterations}) {
  $("language").hidden = false;
  document.querySelector("footer").hidden = true;
  $("policies").append(...agents.map(({name, diff}) => el("div", {class: "card"}, el("div", {class: "name"}, name), words(diff))));
  $("iterations").append(...iterations.map((one, at) => iterationView(one, at === 0)));
}
