"""BrowserTransform: a real Chromium reads pages on loopback, and nothing that is not allowed."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import time
from pathlib import Path

import pytest
from tools.web import Site, leads_to, names_of_this_machine

from torchrl_llm.data.history import History
from torchrl_llm.envs import ChatEnv
from torchrl_llm.errors import TemplateError, WorkerError
from torchrl_llm.tools import browser_rules
from torchrl_llm.tools.browser import BrowserTool, BrowserTransform
from torchrl_llm.tools.browser_driver import BrowserDriver
from torchrl_llm.tools.browser_rules import AddressRules
from torchrl_llm.tools.tool_call import ToolCall

playwright = pytest.importorskip("playwright.async_api")
has_browser = pytest.mark.skipif(
    not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    reason="no Chromium: apt install chromium",
)
PAGE_S = 60.0  # for pages that answer, on a machine that does other things too


@pytest.fixture(scope="module")
def site():
    site = Site()
    yield site
    site.close()


@pytest.fixture(scope="module")
def browser(site):
    """One browser for all tests that close what they open."""
    tool = BrowserTool([site.host], timeout=PAGE_S, start_timeout=120.0)
    yield tool
    tool.close()


@pytest.fixture(scope="module")
def hasty(site):
    """A browser with little patience."""
    tool = BrowserTool([site.host], timeout=5.0, start_timeout=120.0)
    yield tool
    tool.close()


@pytest.fixture
def act(browser):
    def run(action, *, tool=browser, session=0, **args):
        return tool.run(ToolCall("browser", {"action": action, **args}, session=session))

    yield run
    browser.end_session(0)


def waits_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


pytestmark = [pytest.mark.browser, has_browser]


def test_the_model_reads_a_page_and_goes_on_from_it(site, queries):
    tools = BrowserTransform([site.host], timeout=PAGE_S)
    env = ChatEnv(batch_size=(2,)).append_transform(tools)
    td = env.reset(queries("What is the secret number?", "And the second page?"))

    def browse(td, **args):
        call = {"function": {"name": "browser", "arguments": args}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        td["history"].full = History.of([chat + [turn] for chat in td["history"].prompt.chats])
        return env.step_and_maybe_reset(td)[1]

    td = browse(td, action="navigate", url=site.url)
    assert td["history"].prompt.role == [["user", "assistant", "tool"]] * 2
    for chat in td["history"].prompt.chats:
        assert chat[-1]["content"].startswith(f"Shop\n{site.url}/\n\nWelcome\n")
        assert "The secret number is 4711." in chat[-1]["content"]
    text = '<tool>browser\n{"action": "click", "selector": "#two"}</tool>'  # as TorchRL asks for it
    turn = {"role": "assistant", "content": text}
    td["history"].full = History.of([chat + [turn] for chat in td["history"].prompt.chats])
    td = env.step_and_maybe_reset(td)[1]
    assert td["history"].prompt[1, -1].content == f"Two\n{site.url}/two\n\nthe second page"
    assert td["tools", "auxiliary"].all()
    assert tools.browser.num_pages == 2
    env.reset(queries("c", "d"))
    assert waits_for(lambda: tools.browser.num_pages == 0)
    env.close()


def test_links_forms_and_windows_lead_on(site, act):
    act("navigate", url=site.url)
    assert act("click", selector="text=second page").content.startswith("Two\n")
    assert act("back").content.startswith("Shop\n")
    assert act("click", selector="#blank").content.startswith("Two\n")
    act("navigate", url=site.url)
    typed = act("type", selector="input", text="red shoes")
    assert typed.content.startswith("Shop\n")
    assert "asked for /found?q=red+shoes" in act("click", selector="button").content
    act("navigate", url=site.url)
    typed = act("type", selector="input", text="x", submit=True)
    assert "asked for /found?q=x" in typed.content
    assert act("scroll", amount=100).content.startswith("Found\n")


def test_parts_of_a_page_are_extracted(site, act):
    act("navigate", url=site.url)
    assert act("extract", selector="h1").content == "Welcome"
    assert act("extract", selector="a", attribute="href").content.split("\n")[0] == "/two"
    assert act("extract", selector="h1", attribute="html").content == "<h1>Welcome</h1>"
    assert act("extract", selector="h1", extract_type="text", attribute="id").content == "Welcome"
    assert act("extract", selector="video").error == "BrowserError"


@pytest.mark.full
def test_a_huge_page_is_read_in_pieces(site, act):
    first = act("navigate", url=f"{site.url}/huge").content
    assert "[characters 0 to 8000 of 10000000]" in first
    assert len(first) < 8200
    last = act("read", offset=9_999_995).content
    assert last.endswith("[characters 9999995 to 10000000 of 10000000]\n\n56789")


def test_what_a_page_says_is_read_in_spite_of_its_scripts(site, act):
    assert act("navigate", url=f"{site.url}/liar").content.endswith("honest words")


def test_an_error_page_says_its_status(site, act):
    shown = act("navigate", url=f"{site.url}/missing")
    assert (shown.content[:16], shown.error) == ("HTTP status 404\n", "")


@pytest.mark.parametrize("link", ["#zip", "#none", "#file"])
def test_links_that_lead_nowhere_leave_the_page(link, site, act):
    act("navigate", url=site.url)
    assert act("click", selector=link).content.startswith("Shop\n")
    assert act("read").content.startswith("Shop\n")


def test_other_sites_are_out_of_reach_by_address_redirect_link_and_everything_in_a_page(site, act):
    site.asked.clear()
    assert "not among the allowed sites" in act("navigate", url=site.elsewhere).content
    assert act("navigate", url=f"{site.url}/redirect").error == "BrowserError"
    act("navigate", url=site.url)
    act("click", selector="#out")
    assert "stolen" not in act("read").content
    port = site.port
    for url in (f"http://[::1]:{port}/", f"http://2130706433:{port + 1}/", "http://8.8.8.8/"):
        assert act("navigate", url=url).error == "BrowserError"
    assert site.asked == []


def test_only_web_addresses_are_opened(act):
    for url in (
        "file:///etc/passwd",
        "chrome://version",
        "view-source:http://x",
        "javascript:1",
        "/two",
    ):
        answer = act("navigate", url=url)
        assert answer.error == "BrowserError", url
        assert answer.content.startswith("only http and https addresses can be opened"), url


@pytest.mark.parametrize(
    ("args", "error", "said"),
    [
        ({"action": "navigate"}, "InvalidArguments", "navigate needs 'url'"),
        ({"action": "type", "selector": "a"}, "InvalidArguments", "type needs 'text'"),
        ({"action": "click", "selector": "#no"}, "BrowserError", "no visible element"),
        ({"action": "click", "selector": "%$"}, "BrowserError", ""),
        ({"action": "extract", "selector": "%$"}, "BrowserError", "not a valid selector"),
    ],
)
def test_what_cannot_be_done_is_said(args, error, said, act):
    answer = act(**args)
    assert answer.error == error
    assert said in answer.content


def test_arguments_are_checked_before_the_browser_sees_them(browser, act):
    from torchrl_llm.tools import ToolExecutor

    executor = ToolExecutor([browser])
    calls = [
        ToolCall("browser", args) for args in ({}, {"action": "fly"}, {"action": "read", "x": 1})
    ]
    for (result,) in executor.run([[call] for call in calls]):
        assert result.error == "InvalidArguments"
    theirs = ToolCall("browser", {"action": "scroll", "scroll_amount": 100}, session=0)
    assert not executor.run([[theirs]])[0][0].error


@pytest.mark.full
def test_a_page_that_never_loads_is_given_up_and_another_one_opens(site, hasty, act):
    answer = act("navigate", tool=hasty, url=f"{site.url}/hang")
    assert answer.error == "TimeoutError"
    assert "did not answer within 5 s" in answer.content
    assert hasty.num_pages == 1
    assert act("navigate", tool=hasty, url=f"{site.url}/plain").content.endswith("plain words")
    act("navigate", tool=hasty, url=site.url)
    assert act("click", tool=hasty, selector="#hang").error == "TimeoutError"


@pytest.mark.full
def test_a_page_in_an_endless_loop_is_closed_and_its_neighbours_answer(site, hasty, act):
    act("navigate", tool=hasty, url=f"{site.url}/loop")
    deadline = time.monotonic() + 60
    while (error := act("read", tool=hasty).error) == "" and time.monotonic() < deadline:
        time.sleep(0.1)  # its loop begins a moment after it was loaded
    assert error == "TimeoutError"
    assert act("navigate", tool=hasty, session=1, url=f"{site.url}/plain").error == ""
    assert act("navigate", tool=hasty, url=f"{site.url}/plain").error == ""


def test_conversations_share_no_page_and_no_cookie(site, browser, act):
    act("navigate", url=site.url, session=1)
    assert act("read", session=2).content.startswith("\nabout:blank")
    assert "seen=1" in act("navigate", url=f"{site.url}/cookie", session=1).content
    assert "seen=1" not in act("navigate", url=f"{site.url}/cookie", session=2).content
    browser.end_session(1)
    browser.end_session(2)
    assert waits_for(lambda: browser.num_pages == 0)
    assert act("read", session=1).content.startswith("\nabout:blank")
    browser.end_session(1)


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [
        (TimeoutError(), "TimeoutError", "no page could be opened within 60 s"),
        (playwright.Error("out of memory\nand more"), "BrowserError", "out of memory"),
    ],
)
def test_a_page_that_cannot_be_opened_is_an_error_and_the_next_call_opens_one(
    failure, error, said, site, act, browser, monkeypatch
):
    async def opens_nothing():
        raise failure

    async def seat(self, session):
        found = await ours(self, session)
        monkeypatch.setattr(found.context, "new_page", opens_nothing)
        return found

    act("navigate", url=site.url)
    browser.end_session(0)
    ours = BrowserDriver._seat
    with monkeypatch.context() as patch:
        patch.setattr(BrowserDriver, "_seat", seat)
        refused = act("navigate", url=site.url)
    assert (refused.error, refused.content) == (error, said)
    assert "Welcome" in act("navigate", url=site.url).content


def _browsers():
    """The main process of each browser that descends from this one."""
    parents, mains = {}, []
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
            words = (entry / "cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue
        if b"--remote-debugging-pipe" in words and b"--type=" not in words:
            mains.append(int(entry.name))

    def is_ours(pid):
        while pid in parents:
            if pid == os.getpid():
                return True
            pid = parents[pid]
        return False

    return {pid for pid in mains if is_ours(pid)}


@pytest.mark.full
def test_a_browser_that_dies_is_started_again_and_close_leaves_none(site):
    before = _browsers()
    tool = BrowserTool([site.host], timeout=PAGE_S)
    call = ToolCall("browser", {"action": "navigate", "url": f"{site.url}/plain"}, session=0)
    assert tool.run(call).error == ""
    for pid in _browsers() - before:
        os.kill(pid, 9)
    # Its death may be noticed before the call, in the middle of it, or by its end.
    assert tool.run(call).error in ("", "BrowserError", "WorkerError")
    assert waits_for(lambda: tool.run(call).error == "")
    again = pickle.loads(pickle.dumps(tool))
    assert again.run(call).content.endswith("plain words")
    again.close()
    tool.close()
    tool.close()
    assert waits_for(lambda: _browsers() == before)
    assert tool.run(call).error == ""
    tool.close()


def test_without_a_list_loopback_is_out_of_reach(site, anywhere):
    site.asked.clear()
    for url in (site.url, site.elsewhere, f"http://2130706433:{site.port}/", "http://10.0.0.1/"):
        assert anywhere(url).error == "BrowserError"
    assert site.asked == []


@pytest.fixture
def machine():
    """A site on every address of this machine; each request for it counts as ``asked``."""
    site = Site("0.0.0.0")
    yield site
    site.close()


@pytest.fixture(scope="module")
def anywhere():
    """Opens an address in one browser without a list."""
    tool = BrowserTool(timeout=PAGE_S, start_timeout=120.0)
    yield lambda url, **args: tool.run(
        ToolCall("browser", {"action": "navigate", "url": url, **args}, session=0)
    )
    tool.close()


@pytest.mark.full
def test_without_a_list_the_machine_is_out_of_reach_by_its_own_names_and_addresses(
    machine, anywhere, monkeypatch
):
    names = {socket.gethostname(), socket.getfqdn(), *names_of_this_machine()}
    written = {name for host in names for name in (host, f"{host}.", host.upper())}
    written |= {"localhost", "localhost.", "0", "127.1", "2130706433", "0177.0.0.1", "0x7f000001"}
    written |= {"[::ffff:127.0.0.1]", "[::1]", "[::]"}
    leads_to(monkeypatch, {"rebound.example": "127.0.0.1", "metadata.example": "169.254.169.254"})
    for host in [*sorted(written), "rebound.example", "metadata.example"]:
        assert anywhere(f"http://{host}:{machine.port}/").error == "BrowserError", host
    assert machine.asked == []


@pytest.mark.full
def test_without_a_list_a_public_page_is_read_and_what_it_asks_of_this_machine_fails(
    machine, anywhere, monkeypatch
):
    public = Site("127.0.0.77", f"http://{socket.gethostname()}:{machine.port}")
    leads_to(monkeypatch, {"public.example": "127.0.0.77"})
    monkeypatch.setattr(browser_rules, "_may_reach", lambda ip: ip == "127.0.0.77")
    url = f"http://public.example:{public.port}"
    page = anywhere(f"{url}/")
    assert "The secret number is 4711." in page.content, page
    assert anywhere(f"{url}/huge").content.startswith("Huge\n")
    assert "nothing here" in anywhere(f"{url}/missing").content
    gone = anywhere(f"{url}/redirect")
    assert (gone.error, "no public address" in gone.content) == ("BrowserError", True)
    assert len(public.asked) >= 4
    # Its picture, frame, script and socket asked for the machine by its name.
    assert machine.asked == []
    public.close()


def test_a_site_of_this_machine_is_open_to_who_lists_it(machine):
    tool = BrowserTool([f"{socket.gethostname()}:{machine.port}"], timeout=PAGE_S)
    url = f"http://{socket.gethostname()}:{machine.port}/plain"
    call = ToolCall("browser", {"action": "navigate", "url": url})
    assert tool.run(call).content.endswith("plain words")
    tool.close()


def test_a_browser_that_is_not_there_is_an_error_that_says_so():
    with pytest.raises(WorkerError, match=r"did not start(.|\n)*executable_path"):
        BrowserTool(executable_path="/no/such/browser").start()


def test_a_template_without_tools_is_refused(make_tokenizer):
    with pytest.raises(TemplateError, match="tools"):
        BrowserTransform(tokenizer=make_tokenizer())


def test_a_page_that_goes_on_while_it_is_read_is_read_again():
    from playwright.async_api import Error

    class Link:
        calls = 0

        async def send(self, method, arguments=None):
            if method == "Page.getFrameTree":
                return {"frameTree": {"frame": {"id": "1"}}}
            if method == "Page.createIsolatedWorld":
                return {"executionContextId": 1}
            self.calls += 1
            if self.calls < 3:
                raise Error("Protocol error: Cannot find context with specified id")
            if self.calls > 3:
                raise Error("Protocol error: something else")
            return {"result": {"value": "read"}}

    class Seat:
        the_link = Link()

        async def link(self):
            return self.the_link

    driver, seat = BrowserDriver(AddressRules(["example.org"])), Seat()
    assert asyncio.run(driver._in_page(seat, "() => 1")) == "read"
    with pytest.raises(Error, match="something else"):
        asyncio.run(driver._in_page(seat, "() => 1"))
    assert seat.the_link.calls == 4
