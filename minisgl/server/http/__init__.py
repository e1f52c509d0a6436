"""Code that all routes share: access checks, connections, request bodies, the OpenAPI document."""
