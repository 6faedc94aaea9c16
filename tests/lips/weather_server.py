"""An MCP server on standard input and output, by the SDK's own server half: what clients of every make meet."""

from mcp.server import MCPServer

server = MCPServer("weather", log_level="CRITICAL")


@server.tool()
def weather(city: str, days: int) -> str:
    """The weather in a city, for so many days."""
    return f"{days} days of rain in {city}"


@server.tool()
def capital(country: str) -> str:
    """The capital of a country."""
    if country != "Italy":
        raise ValueError(f"nobody knows the capital of {country}")
    return "Rome"


if __name__ == "__main__":
    server.run()
