"""Products of the demo's shop: names, categories and list prices. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

SHOP = "Weir & Daughters"
CURRENCY = "EUR"
BROKEN = "mystery-box"


@dataclass(frozen=True, slots=True)
class Product:
    sku: str
    slug: str
    name: str
    category: str
    price: Decimal
    blurb: str
    stock: int


_LISTED = {
    "Coffee": (
        (
            "Enamel Pour-Over Stand",
            "34.90",
            "Three legs, one ring, no wobble. Fits cones from size one to four.",
        ),
        (
            "Burr Hand Grinder",
            "59.00",
            "Steel conical burrs and forty clicks between espresso and French press.",
        ),
        (
            "Gooseneck Kettle 0.9 l",
            "64.50",
            "Pours as thin as a pencil line, even when it is nearly empty.",
        ),
        (
            "Moka Pot for Three",
            "28.90",
            "Cast aluminium, a beech handle, and a gasket you can replace.",
        ),
        (
            "Double-Walled Glasses, Pair",
            "19.49",
            "Hot inside, cool outside. They survive the dishwasher and most floors.",
        ),
        (
            "Coffee Scale with Timer",
            "42.00",
            "A tenth of a gram, half a second, and two AAA cells a year.",
        ),
    ),
    "Tea": (
        (
            "Stoneware Teapot 1.2 l",
            "48.00",
            "Thrown thick for the long afternoon. The lid stays on when you pour.",
        ),
        ("Bamboo Matcha Whisk", "14.90", "One hundred prongs cut from one piece of white bamboo."),
        (
            "Darjeeling First Flush 100 g",
            "16.49",
            "Picked in March, tastes of green grapes and a little of pepper.",
        ),
        (
            "Smoked Lapsang 100 g",
            "12.99",
            "Dried over pinewood. For letters, rain and blue cheese.",
        ),
        (
            "Tasting Cups, Set of Four",
            "26.00",
            "White inside, so the colour shows you when to stop.",
        ),
        ("Tea Tin with Inner Lid", "9.49", "Keeps out light, air and the smell of the spice rack."),
    ),
    "Kitchen": (
        ("Carbon Steel Pan 26 cm", "54.90", "Heavy, honest and non-stick after a month of eggs."),
        ("Olive Wood Spatula", "11.90", "Cut along the grain, follows the curve of a wok."),
        ("Santoku Knife 17 cm", "79.00", "Sixty-one Rockwell and a handle of smoked oak."),
        ("Salt Cellar with Lid", "17.49", "A pinch away, and dry even next to the kettle."),
        (
            "Linen Tea Towels, Three",
            "22.50",
            "Half linen, so they dry glasses without lint from the first day.",
        ),
        (
            "Cast-Iron Casserole 4 l",
            "119.00",
            "Enamelled inside and out. The lid's bumps rain back on the roast.",
        ),
    ),
    "Desk": (
        (
            "Dot-Grid Notebook A5",
            "13.90",
            "Sewn, so it opens flat, with paper that does not mind a fountain pen.",
        ),
        ("Brass Mechanical Pencil", "32.00", "Point seven, and heavy enough to find in any bag."),
        ("Wool Desk Mat", "39.49", "Four millimetres of felt between you and the cold of January."),
        (
            "Monitor Riser in Ash",
            "74.00",
            "Eleven centimetres, with room for a keyboard and two regrets underneath.",
        ),
        (
            "Cable Weights, Pair",
            "18.90",
            "Cast zinc with a slot. The charger stays where you left it.",
        ),
        (
            "Pen Roll, Waxed Canvas",
            "27.50",
            "Holds seven, ties with leather, gets better with rain.",
        ),
    ),
    "Bags": (
        (
            "Roll-Top Backpack 22 l",
            "98.00",
            "One seam, no zip at the top, and dry down to the laptop.",
        ),
        ("Market Tote", "24.90", "Eighteen ounces of canvas. Carries a melon and its opinion."),
        ("Sling Bag 4 l", "46.50", "For a book, a phone and the long way home."),
        ("Weekender 38 l", "139.00", "Fits the overhead locker and three days by the sea."),
        (
            "Laptop Sleeve 14 inch",
            "36.00",
            "Boiled wool outside, cotton inside, no magnets anywhere.",
        ),
        ("Dopp Kit", "29.90", "Opens wide, stands up, wipes clean."),
    ),
    "Lighting": (
        ("Clamp Lamp", "57.00", "Two springs, one joint, and it stays where you point it."),
        ("Paper Lantern 45 cm", "21.49", "Mulberry paper on wire. Ships flat, glows round."),
        (
            "Dimmable Bulb 2700 K",
            "8.99",
            "Eight hundred lumens that go down to a candle without a hum.",
        ),
        (
            "Portable Table Light",
            "68.50",
            "Nine hours from one charge. The waiters will ask where you got it.",
        ),
        ("Reading Light, Clip-On", "23.90", "Warm, narrow, and kind to the person next to you."),
        ("Beeswax Candles, Six", "15.49", "Burn seven hours each and smell of the hive."),
    ),
    "Outdoor": (
        ("Enamel Camp Mug", "10.90", "Made for the fire, and chips with dignity."),
        ("Wool Blanket 130 × 180", "89.00", "Heavy enough for a beach in October."),
        ("Folding Saw 21 cm", "37.49", "Japanese teeth that cut on the pull and lock on the push."),
        ("Storm Matches, Tin of 50", "7.49", "They burn in the wind, and under water for a while."),
        ("Titanium Spork", "16.90", "Seventeen grams. You need it once, and want it always."),
        ("Dry Bag 10 l", "19.90", "Welded seams, bright orange, floats with the lid shut."),
    ),
    "Garden": (
        ("Hori-Hori Knife", "41.00", "Digs, cuts, measures: the only tool you take to the bed."),
        ("Copper Watering Can 1.5 l", "52.90", "A long neck that reaches the pot behind the pot."),
        ("Twine on a Stand", "18.49", "Jute, a steel cutter, and a base that does not follow you."),
        (
            "Seed Box, Twelve Herbs",
            "24.00",
            "From basil to yarrow, with the month on every envelope.",
        ),
        ("Terracotta Pots, Five", "29.49", "Fired slowly, so the frost finds nothing to open."),
        ("Leather Gloves, Goatskin", "34.00", "Thin enough for seedlings, thick enough for roses."),
    ),
}

CATEGORIES = tuple(_LISTED)


def slug(name: str) -> str:
    cleaned = "".join(c if c.isascii() and c.isalnum() else " " for c in name.lower())
    return "-".join(cleaned.split())


PRODUCTS = (
    *(
        Product(
            f"{category[:3].upper()}-{n:03d}",
            slug(name),
            name,
            category,
            Decimal(price),
            blurb,
            stock=3 + (n * 7 + len(name)) % 40,
        )
        for category, goods in _LISTED.items()
        for n, (name, price, blurb) in enumerate(goods, 1)
    ),
    # An incomplete listing: the page is valid but its SKU is empty. So the extractor's key is empty
    # and the event ends dead, with that reason.
    Product(
        "",
        BROKEN,
        "Mystery Box",
        "Garden",
        Decimal("25.00"),
        "Its contents are still a secret.",
        stock=1,
    ),
)
LIMITED = Product(
    "LTD-001",
    "founders-kettle",
    "The Founder's Kettle",
    "Coffee",
    Decimal("180.00"),
    "Fifty were made. Please do not all knock together.",
    stock=50,
)
