"""A web browser for a model: :class:`BrowserTool` and :class:`BrowserTransform`.

The tool defines the actions and turns their outcomes into results;
:mod:`torchrl_llm.tools.browser_driver` controls the pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from torchrl_llm._checked import Ge, Gt, checked
from torchrl_llm._imports import require
from torchrl_llm._registry import register
from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.errors import ConfigError, WorkerError
from torchrl_llm.tools.background_loop import BackgroundLoop
from torchrl_llm.tools.browser_driver import BrowserDriver, BrowserError
from torchrl_llm.tools.browser_rules import AddressRules
from torchrl_llm.tools.call_parsers import MessageOrTagParser, ToolParser
from torchrl_llm.tools.tool import Restarted, Tool, no_answer
from torchrl_llm.tools.tool_call import ToolCall, ToolOutput
from torchrl_llm.tools.tool_transform import ToolTransform

# Required and optional arguments of each action.
_ACTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "navigate": (("url",), ()),
    "read": ((), ("offset",)),
    "click": (("selector",), ()),
    "type": (("selector", "text"), ("submit",)),
    "scroll": ((), ("amount",)),
    "extract": (("selector",), ("attribute",)),
    "back": ((), ()),
}
BROWSER_SCHEMA: dict[str, Any] = json.loads(
    Path(__file__).with_name("browser_schema.json").read_text(encoding="utf-8")
)
"""Description of the browser for the model."""
# Time limit of a whole call, including the start of the browser and the closing of a page that
# timed out.
_GRACE_S = 5.0


@register("tools", "browser")
class BrowserTool(Restarted, Tool):
    """Opens web pages and acts on them, with one page per conversation and one browser.

    The model reads a page's title, address and text. If a page does not load, an element is missing
    or an address is forbidden, the result has an error. The page closes when its conversation ends.
    The browser starts with the first call, and restarts after a crash.

    Args:
        allowed_domains: hosts that the page, and everything in it, may reach; see
            :class:`~torchrl_llm.tools.browser_rules.AddressRules`. ``None`` for every public host.
        headless: run the browser without a window. timeout: time limit of an action in seconds.
        executable_path: path of the browser; by default a Chromium on the ``PATH``, else
        Playwright's own Chromium. chromium_sandbox: use Chromium's own sandbox; it does not work
        for root. start_timeout: time limit of the browser's start in seconds. page_chars: number of
            characters of a page to show at a time.

    Raises:
        ConfigError: for an invalid argument.
        MissingExtraError: when Playwright is not installed.

    Example:
        >>> tool = BrowserTool(["example.org"])
        >>> tool.run(ToolCall("browser", {"action": "navigate"})).content
        "navigate needs 'url'"
    """

    name: str = BROWSER_SCHEMA["name"]
    description: str = BROWSER_SCHEMA["description"]
    parameters: Mapping[str, Any] = BROWSER_SCHEMA["parameters"]
    stateful = True
    _own = ("_loop", "_driver")

    @checked
    def __init__(
        self,
        allowed_domains: Sequence[str] | None = None,
        *,
        headless: bool = True,
        timeout: Annotated[float, Gt(0)] = 30.0,
        executable_path: str | None = None,
        chromium_sandbox: bool = False,
        start_timeout: Annotated[float, Gt(0)] = 60.0,
        page_chars: Annotated[int, Ge(1)] = 8000,
    ) -> None:
        require("playwright", extra="browser", feature="BrowserTool")
        self.rules = AddressRules(allowed_domains)
        self.start_timeout, self.timeout = start_timeout, timeout + _GRACE_S
        self.settings = {
            "rules": self.rules,
            "headless": headless,
            "timeout_s": timeout,
            "start_timeout_s": start_timeout,
            "executable_path": executable_path,
            "chromium_sandbox": chromium_sandbox,
            "page_chars": page_chars,
        }
        self._begin()

    def _begin(self) -> None:
        self._loop = BackgroundLoop("torchrl_llm-browser")
        self._driver = BrowserDriver(**self.settings)

    def start(self) -> None:
        """Start the browser.

        Raises:
            WorkerError: when the browser did not start.
        """
        self._loop.run(self._driver.start(), timeout_s=self.start_timeout + _GRACE_S)

    @property
    def argument_schema(self) -> Mapping[str, Any]:
        """``parameters``, plus TorchRL's names ``scroll_amount`` and ``extract_type``."""
        others = {
            "scroll_amount": {"type": "integer"},
            "extract_type": {"type": "string", "enum": ["text", "html", "attribute"]},
        }
        return {**self.parameters, "properties": {**self.parameters["properties"], **others}}

    def run(self, call: ToolCall) -> ToolOutput:
        """Run an action; a failure is returned as a result with an error."""
        args = dict(call.args)
        if "scroll_amount" in args:
            args["amount"] = args["scroll_amount"]
        if args.get("extract_type", "attribute") != "attribute":
            args["attribute"] = args["extract_type"]
        action = args.pop("action")
        required, optional = _ACTIONS[action]
        if missing := [name for name in required if name not in args]:
            return ToolOutput(f"{action} needs {missing[0]!r}", "InvalidArguments")
        # Arguments of other actions are ignored, not rejected.
        args = {name: value for name, value in args.items() if name in required + optional}
        try:
            self.start()  # the time limit of the action does not include the start
            work = self._driver.act(call.session, action, args)
            return ToolOutput(self._loop.run(work, timeout_s=self.timeout))
        except BrowserError as error:
            return ToolOutput(str(error), "BrowserError")
        except TimeoutError as error:
            return no_answer("TimeoutError", str(error))
        except WorkerError as error:
            return no_answer("WorkerError", str(error))

    def end_session(self, session: int) -> None:
        """Close the page of a conversation, including cookies and all other state."""
        if self._loop.running:
            self._loop.submit(self._driver.end_session(session))

    @property
    def num_pages(self) -> int:
        """Number of open pages."""
        return self._driver.num_pages

    def close(self) -> None:
        """Close the browser."""
        driver, loop = self._driver, self._loop
        self._begin()
        loop.close(driver.close)


class BrowserTransform(ToolTransform):
    r"""Lets a model use a web browser.

    Args:
        allowed_domains: hosts that the browser may reach; ``None`` for every public host. See
            :class:`BrowserTool` for the rules.
        headless: run the browser without a window.
        timeout: time limit of an action in seconds.
        tokenizer: if given, the constructor checks that its chat template can express calls and
            results.
        tool_name: role of the appended messages.
        parser: parser of calls; by default the form of the chat template, or
            ``<tool>browser\n{"action": ...}</tool>`` in the text.
        executable_path: path of the browser; by default a Chromium on the ``PATH``, else
            Playwright's own Chromium.
        chromium_sandbox: use Chromium's own sandbox; it does not work for root.
        page_chars: number of characters of a page to show at a time.
        kwargs: further arguments of :class:`~torchrl_llm.tools.ToolTransform`.

    Raises:
        ConfigError: for an invalid argument.
        TemplateError: when the tokenizer's template drops calls or results.

    Example:
        >>> tools = BrowserTransform(["example.org"])
        >>> [schema["function"]["name"] for schema in tools.schemas]
        ['browser']
    """

    def __init__(
        self,
        allowed_domains: Sequence[str] | None = None,
        headless: bool = True,
        timeout: float = 30.0,
        tokenizer: Any = None,
        tool_name: str = "tool",
        *,
        parser: ToolParser | None = None,
        executable_path: str | None = None,
        chromium_sandbox: bool = False,
        page_chars: int = 8000,
        **kwargs: Any,
    ) -> None:
        if tokenizer is not None and parser is not None:
            raise ConfigError("tokenizer has no effect with a parser: calls are not the template's")
        browser = BrowserTool(
            allowed_domains,
            headless=headless,
            timeout=timeout,
            executable_path=executable_path,
            chromium_sandbox=chromium_sandbox,
            page_chars=page_chars,
        )
        parser = MessageOrTagParser() if parser is None else parser
        super().__init__([browser], parser, tool_name=tool_name, timeout=timeout, **kwargs)
        self.browser = browser
        self.allowed_domains, self.headless, self.tokenizer = allowed_domains, headless, tokenizer
        if tokenizer is not None:
            ChatFormatter(tokenizer, tools=self.schemas)
