"""A service with two pipelines, as operators see it; the second cannot be drained."""

from serve_app.ingress.operator_api import Json
from serve_app.openai.errors import NotDrained, UnknownPipeline


class ToyOperated:
    async def state(self) -> Json:
        return {"health": {"status": "ready", "reason": None}, **await self.pipelines()}

    async def pipelines(self) -> Json:
        return {"pipelines": [{"pipeline": "one"}, {"pipeline": "two"}]}

    async def controllers(self) -> Json:
        return {"pinned": False}

    async def rounds(self) -> Json:
        return {"rounds": []}

    async def drain(self, name: str) -> Json:
        if name == "two":
            raise NotDrained("two goes on: no other pipeline takes requests")
        return await self.undrain(name)

    async def undrain(self, name: str) -> Json:
        if name not in ("one", "two"):
            raise UnknownPipeline(name=name)
        return {"pipeline": name}
