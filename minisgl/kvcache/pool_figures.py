"""How full the KV pool is, in each group of layers."""

from typing import NamedTuple

from minisgl.kvcache.grouped_manager import Cache, GroupedCacheManager


class PoolFigures(NamedTuple):
    """The pages of one group."""

    window: int  # 0 = the group keeps all tokens
    usable: int
    free: int
    evictable: int
    cached: int  # found by prefix hits, or locked by a request that found them

    @property
    def held(self) -> int:
        """Pages that requests need."""
        return self.usable - self.free - self.evictable


def pool_figures(cache: Cache) -> list[PoolFigures]:
    """The groups' figures. The first group's stand for the pool wherever there is room for one."""
    figures: list[PoolFigures] = []
    if not isinstance(cache, GroupedCacheManager) or cache.keeps_all:
        pages = (cache.num_usable_pages, cache.num_free_pages, cache.num_evictable_pages)
        figures.append(PoolFigures(0, *pages, cache.num_cached_pages))
    if isinstance(cache, GroupedCacheManager):
        for group in cache.windows:
            unused = group.num_evictable_pages
            figures.append(
                PoolFigures(group.window, group.num_usable_pages, group.num_free_pages, unused, unused)
            )
    return figures
