(offset, length) => {
    const text = document.body ? document.body.innerText : "";
    return [document.title.slice(0, 200), text.length, text.slice(offset, offset + length)];
}
