"""Controls Chromium for many conversations; each has its own context and page.

It runs inside an asyncio loop and does not depend on models or tools;
:mod:`torchrl_llm.tools.browser` is the tool. :mod:`torchrl_llm.tools.browser_rules` decides which
addresses may be opened.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from torchrl_llm._imports import require
from torchrl_llm.errors import TorchRLLLMError, WorkerError
from torchrl_llm.tools.browser_rules import AddressRules, PublicProxy

_FEATURE = "BrowserTransform"
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# Time limits for an element to appear and for a click to start a navigation.
_ELEMENT_S = 3.0
_SETTLE_S = 0.15
# Number of retries when a page navigates while it is read, and Chromium's messages for this. A
# closed page was replaced by a window that it opened.
_TRIES = 5
_GONE = ("Cannot find context", "context was destroyed", "No frame for given id", "been closed")
# HTTP statuses that leave the page unchanged.
_NO_CONTENT = (204, 205)
_URL_CHARS = 500
_MAX_ELEMENTS = 100
_READ, _EXTRACT = (
    Path(__file__).with_name(f"browser_{name}.js").read_text(encoding="utf-8")
    for name in ("read", "extract")
)


class BrowserError(TorchRLLLMError, RuntimeError):
    """Raised when an action fails; the message is for the model."""


class _Seat:
    """The open page of one conversation."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.lock = asyncio.Lock()
        self.page: Any = None
        self._link: Any = None
        self._closing: set[asyncio.Future[None]] = set()
        self._arrived = asyncio.Event()
        context.on("page", self.take)
        # Requests of the context, because a new window sends requests before it is announced.
        context.on("request", self._leaves)
        context.on("response", self._answers)
        context.on("requestfailed", lambda request: _is_visit(request) and self._arrived.set())

    def take(self, page: Any) -> None:
        """Make this the current page and close the old page; a link may open a new page."""
        old, self.page, self._link = self.page, page, None
        self._arrived.set()
        page.on("domcontentloaded", lambda _: self._arrived.set())
        page.on("download", lambda _: self._arrived.set())
        if old is not None:
            closing = asyncio.ensure_future(_quietly(old.close()))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _leaves(self, request: Any) -> None:
        if _is_visit(request):
            self._arrived.clear()

    def _answers(self, response: Any) -> None:
        if _is_visit(response.request) and response.status in _NO_CONTENT:
            self._arrived.set()

    async def link(self) -> Any:
        """A low-level channel to the page, because Playwright runs scripts in the page's world."""
        if self._link is None:
            self._link = await self.context.new_cdp_session(self.page)
        return self._link

    async def settle(self) -> None:
        """Wait for a navigation that an action may have started."""
        await asyncio.sleep(_SETTLE_S)
        await self._arrived.wait()
        await self.page.wait_for_load_state("domcontentloaded")


def _is_visit(request: Any) -> bool:
    """Whether a request is for the page itself, not for a resource in it."""
    if not request.is_navigation_request():
        return False
    try:
        return request.frame.parent_frame is None
    except _errors().Error:
        return True  # the request comes from a window that does not exist yet


@dataclass(eq=False)
class BrowserDriver:
    """Opens pages and acts on them; every method runs in the same loop.

    Args:
        rules: rules for the addresses that may be opened.
        headless: run the browser without a window.
        timeout_s: time limit of an action in seconds; a page that exceeds it is closed.
        start_timeout_s: time limit of the browser's start in seconds.
        executable_path: path of the browser; by default a Chromium on the ``PATH``, else
            Playwright's own Chromium.
        chromium_sandbox: use Chromium's own sandbox; it does not work for root.
        page_chars: number of characters of a page to show at a time.

    Attributes:
        num_starts: number of browser starts.
    """

    rules: AddressRules
    _: KW_ONLY
    headless: bool = True
    timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    executable_path: str | None = None
    chromium_sandbox: bool = False
    page_chars: int = 8000

    def __post_init__(self) -> None:
        self.num_starts = 0
        self._playwright: Any = None
        self._browser: Any = None
        self._seats: dict[int | None, _Seat] = {}
        self._proxy = PublicProxy()
        self._starting = asyncio.Lock()

    @property
    def num_pages(self) -> int:
        """Number of open pages."""
        return len(self._seats)

    # The browser

    async def start(self) -> None:
        """Start the browser, or restart it after a crash.

        Raises:
            MissingExtraError: when Playwright is not installed.
            WorkerError: when the browser did not start.
        """
        async with self._starting:
            if self._browser is not None and self._browser.is_connected():
                return
            await self._stop()
            try:
                await asyncio.wait_for(self._launch(), self.start_timeout_s)
            except (TimeoutError, _errors().Error) as error:
                await self._stop()
                reason = str(error).splitlines()[0] if str(error) else "no answer in time"
                raise WorkerError(
                    f"the browser did not start: {reason}; install Chromium (apt install chromium, "
                    "or playwright install chromium), or pass executable_path=..."
                ) from None
            self.num_starts += 1

    async def _launch(self) -> None:
        if self._playwright is None:
            self._playwright = await _errors().async_playwright().start()
        way = ["--no-proxy-server"]
        if self.rules.allowed is None:
            proxy = f"--proxy-server=socks5://127.0.0.1:{await self._proxy.start()}"
            # By default, Chromium does not use the proxy for addresses of this machine.
            way = [proxy, "--proxy-bypass-list=<-loopback>"]
        programs = filter(None, map(shutil.which, _PROGRAMS))
        # The trainer's variables (keys, proxies) are not passed on.
        env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        self._browser = await self._playwright.chromium.launch(
            executable_path=self.executable_path or next(programs, None),
            headless=self.headless,
            chromium_sandbox=self.chromium_sandbox,
            env={**env, "DISPLAY": os.environ.get("DISPLAY", "")},
            args=[
                f"--host-resolver-rules={self.rules.resolver_rules}",
                *way,
                "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
                "--js-flags=--max-old-space-size=512",
            ],
            # Block windows that open without a click.
            ignore_default_args=["--disable-popup-blocking"],
        )

    async def _stop(self) -> None:
        self._seats.clear()
        browser, self._browser = self._browser, None
        if browser is not None:
            await _quietly(browser.close())

    async def close(self) -> None:
        """Close every page and the browser; may be called twice."""
        async with self._starting:
            await self._stop()
            await self._proxy.close()
            playwright, self._playwright = self._playwright, None
            if playwright is not None:
                await _quietly(playwright.stop())

    async def end_session(self, session: int | None) -> None:
        """Close the page of a conversation.

        Args:
            session: the conversation.
        """
        seat = self._seats.pop(session, None)
        if seat is not None:
            await _quietly(seat.context.close())

    # Acting

    async def act(self, session: int | None, action: str, args: Mapping[str, Any]) -> str:
        """Run an action in the page of a conversation.

        Args:
            session: the conversation.
            action: an action of :class:`~torchrl_llm.tools.browser.BrowserTool`.
            args: arguments of the action.

        Returns:
            The content of the page after the action.

        Raises:
            BrowserError: when the action failed.
            TimeoutError: when the action took too long; then the page was closed.
            WorkerError: when the browser did not start, or died.
        """
        await self.start()
        work = getattr(self, f"_{action}")
        error_type = _errors().Error
        try:
            seat = await asyncio.wait_for(self._seat(session), self.timeout_s)
            async with seat.lock:
                if seat.page is None or seat.page.is_closed():
                    await self._open(seat)
                try:
                    return await asyncio.wait_for(work(seat, **args), self.timeout_s)
                except TimeoutError:
                    await self._renew(seat)
                    raise TimeoutError(
                        f"the page did not answer within {self.timeout_s:g} s and was closed"
                    ) from None
        except error_type as error:
            if self._browser is None or not self._browser.is_connected():
                raise WorkerError(
                    "the browser died; it is started again by the next call"
                ) from None
            raise BrowserError(_first_line(error)) from None

    async def _seat(self, session: int | None) -> _Seat:
        seat = self._seats.get(session)
        if seat is None:
            context = await self._browser.new_context(
                accept_downloads=False, service_workers="block"
            )
            seat = self._seats.setdefault(session, _Seat(context))
            if seat.context is not context:
                await _quietly(context.close())
        return seat

    async def _open(self, seat: _Seat) -> None:
        try:
            await asyncio.wait_for(seat.context.new_page(), self.timeout_s)
        except TimeoutError:
            await self._give_up(seat)
            raise TimeoutError(f"no page could be opened within {self.timeout_s:g} s") from None
        except _errors().Error:
            await self._give_up(seat)
            raise

    async def _renew(self, seat: _Seat) -> None:
        # The old page is closed when the new one is taken; this also kills a renderer in an endless
        # loop.
        try:
            await asyncio.wait_for(seat.context.new_page(), 5.0)
        except (TimeoutError, _errors().Error):
            await self._give_up(seat)

    async def _give_up(self, seat: _Seat) -> None:
        self._seats = {key: kept for key, kept in self._seats.items() if kept is not seat}
        await _quietly(seat.context.close())

    async def _navigate(self, seat: _Seat, url: str) -> str:
        if problem := self.rules.problem(url):
            raise BrowserError(problem)
        try:
            answer = await seat.page.goto(
                url, wait_until="domcontentloaded", timeout=1000 * self.timeout_s
            )
        except _errors().TimeoutError:
            raise TimeoutError from None
        except _errors().Error as error:
            if not self._browser.is_connected():
                raise
            # Chromium shows its own error page a moment later. This would disturb the next steps.
            await self._renew(seat)
            reason = _first_line(error)
            if "ERR_NAME_NOT_RESOLVED" in reason:
                reason = "it leads to an address that does not exist or is not allowed"
            elif "ERR_SOCKS" in reason:
                reason = "it leads to no public address, or to one that does not answer"
            raise BrowserError(f"{url} could not be opened: {reason}") from None
        status = "" if answer is None or answer.ok else f"HTTP status {answer.status}\n"
        return status + await self._read(seat)

    async def _in_page(self, seat: _Seat, function: str, *args: Any) -> Any:
        """Call a function in an isolated world that the page's scripts cannot reach."""
        for tries_left in reversed(range(_TRIES)):
            try:
                answer = await self._called(seat, function, *args)
                break
            except _errors().Error as error:
                # The page navigated between two of these steps.
                if not tries_left or not any(word in str(error) for word in _GONE):
                    raise
                await asyncio.sleep(_SETTLE_S)
        if "exceptionDetails" in answer:
            described = answer["exceptionDetails"].get("exception", {}).get("description", "")
            raise BrowserError(described.partition("\n")[0] or "the page cannot be read")
        return answer["result"]["value"]

    async def _called(self, seat: _Seat, function: str, *args: Any) -> Mapping[str, Any]:
        link = await seat.link()
        frame = (await link.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        world = await link.send("Page.createIsolatedWorld", {"frameId": frame})
        return await link.send(
            "Runtime.callFunctionOn",
            {
                "functionDeclaration": function,
                "arguments": [{"value": value} for value in args],
                "executionContextId": world["executionContextId"],
                "returnByValue": True,
            },
        )

    async def _read(self, seat: _Seat, offset: int = 0) -> str:
        title, total, text = await self._in_page(seat, _READ, offset, self.page_chars)
        offset, end = min(offset, total), min(offset + self.page_chars, total)
        whole = (offset, end) == (0, total)
        shown = "" if whole else f"[characters {offset} to {end} of {total}]\n"
        return f"{title}\n{seat.page.url[:_URL_CHARS]}\n{shown}\n{text}"

    async def _click(self, seat: _Seat, selector: str) -> str:
        await self._element(seat, selector, "click", no_wait_after=True)
        return await self._after(seat)

    async def _type(self, seat: _Seat, selector: str, text: str, submit: bool = False) -> str:
        await self._element(seat, selector, "fill", text)
        if submit:
            await self._element(seat, selector, "press", "Enter", no_wait_after=True)
        return await self._after(seat)

    async def _scroll(self, seat: _Seat, amount: int = 600) -> str:
        await seat.page.mouse.wheel(0, amount)
        return await self._after(seat)

    async def _back(self, seat: _Seat) -> str:
        await seat.page.go_back(wait_until="domcontentloaded", timeout=1000 * self.timeout_s)
        return await self._read(seat)

    async def _after(self, seat: _Seat) -> str:
        await seat.settle()
        return await self._read(seat)

    async def _extract(self, seat: _Seat, selector: str, attribute: str = "text") -> str:
        total, texts = await self._in_page(
            seat, _EXTRACT, selector, attribute, _MAX_ELEMENTS, self.page_chars
        )
        if not total:
            raise BrowserError(f"no element fits the selector {selector!r}")
        more = f"\n[{total - len(texts)} more]" if total > len(texts) else ""
        return "\n".join("" if text is None else text for text in texts)[: self.page_chars] + more

    async def _element(
        self, seat: _Seat, selector: str, what: str, *args: str, **kwargs: bool
    ) -> None:
        element = seat.page.locator(selector).first
        wait_s = min(_ELEMENT_S, self.timeout_s / 2)
        try:
            await element.wait_for(timeout=1000 * wait_s)
            await getattr(element, what)(*args, timeout=1000 * wait_s, **kwargs)
        except _errors().TimeoutError:
            raise BrowserError(
                f"no visible element fits the selector {selector!r}, or it cannot be used"
            ) from None


def _errors() -> Any:
    return require("playwright.async_api", extra="browser", feature=_FEATURE)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(": ")[2] or str(error).partition("\n")[0]


async def _quietly(work: Any) -> None:
    """Wait for a page or browser to close; ignore it if it hangs or is already closed."""
    try:
        await asyncio.wait_for(work, 5.0)
    except (TimeoutError, _errors().Error):
        return
