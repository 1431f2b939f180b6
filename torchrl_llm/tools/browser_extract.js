(selector, attribute, count, length) => {
    const found = [...document.querySelectorAll(selector)];
    const texts = found.slice(0, count).map(e => attribute === "text" ? e.innerText
        : attribute === "html" ? e.outerHTML : e.getAttribute(attribute));
    return [found.length, texts.map(text => text === null ? null : text.slice(0, length))];
}
