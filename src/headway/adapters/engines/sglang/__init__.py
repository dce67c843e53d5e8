"""Engines that speak SGLang's API: `wire` is how they generate; `SglangEngine` (admin) administers one server."""
