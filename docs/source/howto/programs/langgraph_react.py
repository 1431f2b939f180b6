"""A calculator agent as a graph of LangGraph: the model, its tools, and back to the model."""

import re

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly."""
    if not re.fullmatch(r"[\d\s+*/()-]{1,60}", expression) or "**" in expression:
        return "cannot be computed"
    return str(eval(expression))


async def run(row, base_url, api_key):
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    model = model.bind_tools([calculator])

    async def ask(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([calculator], handle_tool_errors=True))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    start = {"messages": [("system", "Use the calculator."), ("user", row["query"])]}
    try:
        end = await graph.compile().ainvoke(start, {"recursion_limit": 6})
    except GraphRecursionError:
        return 0.0
    numbers = re.findall(r"-?\d+", end["messages"][-1].content)
    return float(numbers[-1:] == [row["answer"]])
