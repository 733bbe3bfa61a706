// The search box of the page of errors: it ranks the messages of errors.js by the words that they share with the text.
(function () {
  const wordsOf = (text) => [...new Set(text.toLowerCase().match(/[a-z0-9_]{2,}/g) || [])];
  const messages = window.errorMessages.map(([kind, cause, remedy]) => ({
    kind, cause, remedy,
    text: `${kind} ${cause} ${remedy}`.toLowerCase(),
    words: new Set(wordsOf(`${kind} ${cause} ${remedy}`.replace(/<[^<>]*>/g, " "))),
  }));
  const counts = new Map();
  messages.forEach((each) => each.words.forEach((word) => counts.set(word, (counts.get(word) || 0) + 1)));
  const weight = (word) => Math.log((messages.length + 1) / (counts.get(word) || messages.length));
  const sum = (words) => words.reduce((all, word) => all + weight(word), 0);
  messages.forEach((each) => { each.whole = sum([...each.words]); });

  // A message that was pasted has values in place of <these>. So it need not have all words in common: rare ones count most.
  function find(text) {
    const words = wordsOf(text);
    const score = (each) => {
      const inside = words.every((word) => each.text.includes(word)) ? 1 : 0;
      return inside + sum(words.filter((word) => each.words.has(word))) / Math.sqrt(each.whole + 1);
    };
    return messages.map((each) => [score(each), each]).filter(([points]) => points > 0.5)
      .sort((one, other) => other[0] - one[0]).slice(0, 10).map(([, each]) => each);
  }

  const box = document.getElementById("error-text");
  const list = document.getElementById("error-list");
  function show() {
    const found = box.value.trim() ? find(box.value) : [];
    list.replaceChildren(...found.map((each) => {
      const item = document.createElement("li");
      const cause = document.createElement("code");
      cause.textContent = each.cause;
      const remedy = document.createElement("p");
      remedy.textContent = each.remedy || "(the message says no more)";
      item.append(`${each.kind}: `, cause, remedy);
      return item;
    }));
    if (box.value.trim() && !found.length) list.append("No message of the package is like that.");
  }
  box.addEventListener("input", show);
  box.value = new URLSearchParams(location.search).get("error") || "";
  show();
})();
