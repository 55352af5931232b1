"""Pages of the demo's shop: HTML, RSS and sitemap from values.

No state and no clock. The pages load no other files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from decimal import Decimal
from email.utils import formatdate
from html import escape
from xml.sax.saxutils import escape as xml

from penstock.demo.goods import CATEGORIES, CURRENCY, LIMITED, SHOP, Product, slug
from penstock.operate.figures import iso

__all__ = [
    "busy",
    "category",
    "feed",
    "front",
    "iso",
    "missing",
    "product",
    "sitemap",
    "sitemap_index",
    "slug",
]

_CSS = (
    "\n"
    ":root{color-scheme:light dark;--paper:#fbf9f4;--card:#fff;--ink:#22282b;--soft:#6b7478;"
    "--line:#e4dfd3;--accent:#0f6e6e}\n"
    "@media(prefers-color-scheme:dark){:root{--paper:#15191b;--card:#1d2325;--ink:#e9e6df;"
    "--soft:#98a2a5;--line:#2d3538;--accent:#5cc4bd}}\n"
    "*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);"
    'font:17px/1.55 Georgia,"Iowan Old Style",serif}\n'
    "a{color:inherit;text-decoration:none}a:hover{color:var(--accent)}"
    "header,main,footer{max-width:66rem;margin:auto;padding:1.2rem 1.5rem}\n"
    "header{display:flex;flex-wrap:wrap;gap:.4rem 1.4rem;align-items:baseline;"
    "border-bottom:1px solid var(--line)}header b{font-size:1.35rem;margin-right:auto}\n"
    "header nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem;"
    "font:.85rem/1.6 system-ui,sans-serif;color:var(--soft)}\n"
    ".grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(13rem,1fr));gap:1.2rem;"
    "padding:0;list-style:none}\n"
    ".card{display:block;background:var(--card);border:1px solid var(--line);"
    "border-radius:10px;overflow:hidden}.card svg{display:block;width:100%;height:9rem}\n"
    ".card div{padding:.7rem .9rem .9rem}"
    ".card small,.soft,footer{color:var(--soft);font:.82rem/1.5 system-ui,sans-serif}"
    ".card strong{font-weight:600;display:block}\n"
    "article{display:grid;grid-template-columns:minmax(0,5fr) minmax(0,6fr);gap:2.5rem;"
    "margin:1.5rem 0 2.5rem}article svg{width:100%;height:auto;border-radius:12px}\n"
    "@media(max-width:44rem){article{grid-template-columns:1fr}}"
    "h1{font-size:2rem;line-height:1.2;margin:.3rem 0 .6rem}"
    "h2{font-size:1.1rem;margin:2rem 0 .8rem}\n"
    ".price,.cost__now{font:600 1.6rem system-ui,sans-serif;color:var(--accent);"
    "margin:1rem 0 .2rem}footer{border-top:1px solid var(--line);margin-top:2rem}\n"
    ".banner{background:var(--accent);color:var(--paper);border-radius:12px;"
    "padding:1.1rem 1.4rem}\n"
)


def money(amount: Decimal) -> str:
    return f"€{amount:.2f}"


def _picture(item: Product) -> str:
    """Return an SVG picture that is derived from the product's name."""
    d = hashlib.blake2b(item.slug.encode(), digest_size=8).digest()
    hue, other = d[0] * 360 // 256, (d[0] * 360 // 256 + 40 + d[1] % 120) % 360
    x, y, r = 90 + d[2] % 120, 70 + d[3] % 40, 34 + d[4] % 26
    w, h = 50 + d[5] % 60, 60 + d[6] % 60
    left = x + r // 2 if x < 150 else x - r // 2 - w  # the shapes overlap, and both are visible
    return (
        f'<svg viewBox="0 0 300 200" role="img" aria-label="{escape(item.name)}" '
        f'preserveAspectRatio="xMidYMid slice">'
        f'<rect width="300" height="200" fill="hsl({hue} 32% 84%)"/>'
        f'<rect y="150" width="300" height="50" fill="hsl({hue} 26% 70%)"/>'
        f'<rect x="{left}" y="{165 - h}" width="{w}" height="{h}" rx="{6 + d[7] % 24}" '
        f'fill="hsl({other} 38% 48%)"/>'
        f'<circle cx="{x}" cy="{max(y, 165 - r)}" r="{r}" '
        f'fill="hsl({hue} 46% 40%)" opacity=".92"/></svg>'
    )


def _document(title: str, main: str, head: str = "") -> str:
    nav = "".join(f'<a href="/category/{slug(c)}">{escape(c)}</a>' for c in CATEGORIES)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n"
        '<link rel="alternate" type="application/rss+xml" href="/feed.xml" '
        f'title="Price changes">\n{head}</head>\n<body>\n'
        f'<header><b><a href="/">{escape(SHOP)}</a></b><nav>{nav}</nav></header>\n'
        f"<main>\n{main}\n</main>\n"
        f"<footer>{escape(SHOP)} exists only on this machine. "
        "Its prices change every few seconds.</footer>\n</body>\n</html>\n"
    )


def _card(item: Product, *, related: bool = False) -> str:
    """Return the card of a product. The card of a related product has no price.

    So a product's page changes only when its own price changes.
    """
    kind, price = ("card related", "") if related else ("card", money(item.price))
    return (
        f'<li><a class="{kind}" href="/product/{item.slug}">{_picture(item)}'
        f"<div><small>{escape(item.category)}</small>"
        f"<strong>{escape(item.name)}</strong>{price}</div></a></li>"
    )


def front(products: Sequence[Product], limited: str) -> str:
    banner = (
        f'<p><a class="card banner" href="{escape(limited)}/product/{LIMITED.slug}">'
        f"{escape(LIMITED.name)} · {escape(LIMITED.blurb)}</a></p>"
    )
    return _document(
        SHOP,
        f"{banner}<h1>Good things, few of them</h1>\n"
        f"<ul class=grid>{''.join(_card(p) for p in products)}</ul>",
    )


def category(name: str, products: Sequence[Product]) -> str:
    return _document(
        f"{name} · {SHOP}",
        f"<h1>{escape(name)}</h1>\n<ul class=grid>{''.join(_card(p) for p in products)}</ul>",
    )


def product(
    item: Product, related: Sequence[Product], *, broken: bool = False, redesigned: bool = False
) -> str:
    described = {
        "@context": "https://schema.org",
        "@type": "Product",
        "sku": item.sku,
        "name": item.name,
        "category": item.category,
        "description": item.blurb,
        "offers": {
            "@type": "Offer",
            "price": str(item.price),
            "priceCurrency": CURRENCY,
            "availability": "https://schema.org/InStock",
        },
    }
    if broken:
        del described["sku"]
    data = json.dumps(described, ensure_ascii=False).replace("<", chr(92) + "u003c")
    head = f'<script type="application/ld+json">{data}</script>\n'
    # The same text with other markup, as after a relaunch of a site.
    if redesigned:
        price = f'<p class="cost__now"><data value="{item.price}">{money(item.price)}</data></p>'
    else:
        price = f'<p class="price" data-price="{item.price}">{money(item.price)}</p>'
    suggestions = (
        "<h2>Goes well with</h2>\n"
        f"<ul class=grid>{''.join(_card(p, related=True) for p in related)}</ul>"
        if related
        else ""
    )
    return _document(
        f"{item.name} · {SHOP}",
        f'<article data-sku="{escape(item.sku)}">\n{_picture(item)}\n<div>\n'
        f'<a class="soft" href="/category/{slug(item.category)}">{escape(item.category)}</a>\n'
        f"<h1>{escape(item.name)}</h1>\n<p>{escape(item.blurb)}</p>\n{price}\n"
        f'<p class="soft">{item.stock} in stock · {escape(item.sku) or "no number yet"}</p>\n'
        f"</div>\n</article>\n{suggestions}",
        head,
    )


def missing() -> str:
    return _document(
        f"Not here · {SHOP}",
        "<h1>We do not have that</h1><p>It may have been sold, or never made.</p>",
    )


def busy(seconds: int) -> str:
    return _document(
        f"One at a time · {SHOP}",
        f"<h1>One at a time, please</h1><p>Please try again in {seconds} seconds.</p>",
    )


def feed(base: str, changes: Sequence[tuple[int, float, Product, Decimal, Decimal]]) -> str:
    """Return an RSS 2.0 feed of changes (id, time, product, old and new price), in their order."""
    items = "".join(
        f"<item><title>{xml(p.name)}: {money(old)} → {money(new)}</title>"
        f"<link>{xml(base)}/product/{p.slug}</link>"
        f'<guid isPermaLink="false">{slug(SHOP)}-change-{n}</guid>'
        f"<pubDate>{formatdate(at, usegmt=True)}</pubDate></item>\n"
        for n, at, p, old, new in changes
    )
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<rss version="2.0"><channel>'
        f"<title>{xml(SHOP)}: price changes</title><link>{xml(base)}/</link>"
        f"<description>Every price that moved.</description>\n{items}</channel></rss>\n"
    )


def sitemap(pages: Sequence[tuple[str, float]]) -> str:
    return _sitemap("urlset", "url", pages)


def sitemap_index(parts: Sequence[tuple[str, float]]) -> str:
    return _sitemap("sitemapindex", "sitemap", parts)


def _sitemap(root: str, item: str, listed: Sequence[tuple[str, float]]) -> str:
    entries = "".join(
        f"<{item}><loc>{xml(url)}</loc><lastmod>{iso(at)}</lastmod></{item}>\n"
        for url, at in listed
    )
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<{root} xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
        f"{entries}</{root}>\n"
    )
