"""Words and plain facts that everyday questions are made of. General knowledge, written down for this purpose."""

from __future__ import annotations

__all__ = [
    "ADJECTIVES",
    "ANIMALS",
    "BLAME",
    "CAPITALS",
    "CITIES",
    "COLOURS",
    "CONTINENTS",
    "COUNTED",
    "DAYS",
    "FOODS",
    "GLAD",
    "LAST_NAMES",
    "LISTS",
    "MONTHS",
    "NAMES",
    "OPPOSITES",
    "PAST",
    "PLURALS",
    "PRAISE",
    "PROFESSIONS",
    "REPORTS",
    "REVIEWED",
    "ROOMS",
    "SORRY",
    "THINGS",
    "VARIABLES",
]


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs written as `one: other, one: other`."""
    return tuple((one.strip(), other.strip()) for one, other in (pair.split(":") for pair in text.split(",")))


NAMES = _split(
    "Adam Alice Amir Anna Ben Carla Carlos Clara Daniel David Diana Elena Emma Erik Eva Felix Fiona George Grace Hannah "
    "Henry Ida Ivan Jack James Jane Julia Karl Kate Laura Leo Lily Linda Lucas Lucy Maria Mark Martin Mary Max Mia Nina "
    "Noah Olga Oliver Omar Oscar Paul Peter Rachel Robert Rosa Ruth Sam Sara Simon Sofia Susan Thomas Tim Tina Tom "
    "Victor Wendy"
)

CITIES = _split(
    "Amsterdam Athens Barcelona Berlin Boston Brussels Budapest Cairo Chicago Copenhagen Denver Dublin Geneva Hamburg "
    "Helsinki Istanbul Lagos Lima Lisbon London Madrid Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Oslo "
    "Paris Prague Rome Seattle Seoul Stockholm Sydney Tokyo Toronto Vienna Warsaw Zurich"
)

PROFESSIONS = _split(
    "actor architect artist baker carpenter chef dentist doctor driver engineer farmer gardener journalist judge lawyer "
    "librarian musician nurse painter photographer pilot plumber sailor scientist singer soldier student tailor teacher "
    "waiter writer"
)

COLOURS = _split("black blue brown green grey orange pink purple red white yellow")

THINGS = _split(
    "apple bag ball basket bell belt bench bike blanket boat book bottle bowl box bread brick bridge broom brush bucket "
    "button candle carpet chain chair clock cloud coat coin cup curtain desk dish door dress drum engine fence flag floor "
    "flower fork garden gate glass glove guitar hammer hat house jacket jar key kitchen knife ladder lamp leaf letter "
    "map mirror nail needle paper pencil phone piano picture pillow pipe plate pocket pot radio ring river road rope "
    "sail scarf shelf shirt shoe shovel sock spoon stone stove street table tent ticket tower towel tree truck umbrella "
    "vase wall wagon watch wheel window"
)

FOODS = _split(
    "almond apple apricot banana bean beetroot bread butter cabbage carrot celery cheese cherry chicken corn cucumber "
    "egg garlic ginger grape ham honey lemon lentil lettuce mango melon milk mushroom noodle nut oil onion "
    "orange pasta pear pepper pineapple plum potato pumpkin radish rice salad salt sausage soup spinach sugar tea "
    "tomato walnut yogurt"
)

ANIMALS = _split(
    "ant bear bee bird butterfly camel cat chicken cow crab crow deer dog dolphin donkey duck eagle elephant fish fox "
    "frog giraffe goat goose hawk horse kangaroo lion lizard monkey mouse owl panda parrot penguin pig pigeon rabbit rat "
    "seal shark sheep snake spider swan tiger turtle whale wolf zebra"
)

ADJECTIVES = _split(
    "big bright broken cheap clean cold dark dry empty fresh full heavy high hot large light long loud narrow new old "
    "open plain quiet round sharp short simple small smooth soft strong tall thick thin tiny warm wet wide young"
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS = _split("January February March April May June July August September October November December")

CAPITALS = _pairs(
    "Afghanistan: Kabul, Albania: Tirana, Algeria: Algiers, Argentina: Buenos Aires, Armenia: Yerevan, Australia: "
    "Canberra, Austria: Vienna, Bangladesh: Dhaka, Belgium: Brussels, Brazil: Brasilia, Bulgaria: Sofia, Canada: Ottawa, "
    "Chile: Santiago, China: Beijing, Colombia: Bogota, Croatia: Zagreb, Cuba: Havana, Cyprus: Nicosia, the Czech "
    "Republic: Prague, Denmark: Copenhagen, Ecuador: Quito, Egypt: Cairo, Estonia: Tallinn, Ethiopia: Addis Ababa, "
    "Finland: Helsinki, France: Paris, Germany: Berlin, Ghana: Accra, Greece: Athens, Hungary: Budapest, Iceland: "
    "Reykjavik, India: New Delhi, Indonesia: Jakarta, Iran: Tehran, Iraq: Baghdad, Ireland: Dublin, Italy: Rome, Jamaica: "
    "Kingston, Japan: Tokyo, Jordan: Amman, Kenya: Nairobi, Latvia: Riga, Lebanon: Beirut, Lithuania: Vilnius, Malaysia: "
    "Kuala Lumpur, Mexico: Mexico City, Mongolia: Ulaanbaatar, Morocco: Rabat, Nepal: Kathmandu, New Zealand: Wellington, "
    "Nigeria: Abuja, Norway: Oslo, Pakistan: Islamabad, Peru: Lima, the Philippines: Manila, Poland: Warsaw, Portugal: "
    "Lisbon, Qatar: Doha, Romania: Bucharest, Russia: Moscow, Saudi Arabia: Riyadh, Senegal: Dakar, Serbia: Belgrade, "
    "Slovakia: Bratislava, Slovenia: Ljubljana, South Korea: Seoul, Spain: Madrid, Sudan: Khartoum, Sweden: Stockholm, "
    "Switzerland: Bern, Syria: Damascus, Thailand: Bangkok, Tunisia: Tunis, Turkey: Ankara, Uganda: Kampala, the United "
    "Kingdom: London, Uruguay: Montevideo, Venezuela: Caracas, Vietnam: Hanoi, Zambia: Lusaka, Zimbabwe: Harare"
)

CONTINENTS = _pairs(
    "Algeria: Africa, Angola: Africa, Argentina: South America, Austria: Europe, Bangladesh: Asia, Belgium: Europe, "
    "Bolivia: South America, Brazil: South America, Canada: North America, Chad: Africa, Chile: South America, China: "
    "Asia, Colombia: South America, Denmark: Europe, Ecuador: South America, Ethiopia: Africa, Finland: Europe, France: "
    "Europe, Germany: Europe, Ghana: Africa, Greece: Europe, Hungary: Europe, India: Asia, Iran: Asia, Iraq: Asia, "
    "Ireland: Europe, Italy: Europe, Japan: Asia, Kenya: Africa, Mali: Africa, Mexico: North America, Mongolia: Asia, "
    "Morocco: Africa, Nepal: Asia, Nigeria: Africa, Norway: Europe, Pakistan: Asia, Paraguay: South America, Peru: South "
    "America, Poland: Europe, Portugal: Europe, Senegal: Africa, Spain: Europe, Sudan: Africa, Sweden: Europe, "
    "Switzerland: Europe, Tanzania: Africa, Thailand: Asia, Tunisia: Africa, Uganda: Africa, Uruguay: South America, "
    "Venezuela: South America, Vietnam: Asia, Zambia: Africa, Zimbabwe: Africa"
)

OPPOSITES = _pairs(
    "alive: dead, asleep: awake, awake: asleep, beautiful: ugly, before: after, after: before, bottom: top, top: bottom, "
    "buy: sell, sell: buy, cheap: expensive, expensive: cheap, clean: dirty, dirty: clean, dangerous: safe, day: night, "
    "night: day, deep: shallow, shallow: deep, dry: wet, wet: dry, east: west, west: east, empty: full, full: empty, "
    "even: odd, odd: even, false: true, true: false, first: last, last: first, front: back, good: bad, bad: good, happy: "
    "sad, heavy: light, heaven: hell, high: low, low: high, hot: cold, cold: hot, inside: outside, outside: "
    "inside, left: right, long: short, loud: quiet, win: lose, love: hate, hate: love, male: female, female: "
    "male, maximum: minimum, minimum: maximum, narrow: wide, wide: narrow, near: far, far: near, north: south, south: "
    "north, poor: rich, rich: poor, positive: negative, negative: positive, push: pull, pull: "
    "push, question: answer, rough: smooth, smooth: rough, slow: fast, fast: slow, strong: "
    "weak, weak: strong, thick: thin, tall: short, up: down, down: up, war: peace, peace: war, yes: no"
)

PAST = _pairs(
    "become: became, begin: began, bite: bit, blow: blew, break: broke, bring: brought, build: built, buy: bought, catch: "
    "caught, choose: chose, come: came, do: did, draw: drew, drink: drank, drive: drove, eat: ate, fall: fell, feed: fed, "
    "feel: felt, fight: fought, find: found, fly: flew, forget: forgot, freeze: froze, get: got, give: gave, go: went, "
    "grow: grew, hear: heard, hide: hid, hold: held, keep: kept, know: knew, leave: left, lend: lent, lose: lost, make: "
    "made, meet: met, pay: paid, ride: rode, ring: rang, rise: rose, run: ran, say: said, see: saw, sell: sold, send: "
    "sent, shake: shook, sing: sang, sink: sank, sit: sat, sleep: slept, speak: spoke, spend: spent, stand: stood, steal: "
    "stole, swim: swam, take: took, teach: taught, tell: told, think: thought, throw: threw, understand: understood, "
    "wear: wore, win: won, write: wrote"
)

PLURALS = _pairs(
    "apple: apples, baby: babies, bench: benches, book: books, box: boxes, brush: brushes, bus: buses, car: cars, child: "
    "children, church: churches, city: cities, class: classes, country: countries, dish: dishes, dress: dresses, family: "
    "families, fly: flies, foot: feet, fox: foxes, glass: glasses, goose: geese, half: halves, house: houses, kiss: "
    "kisses, knife: knives, lady: ladies, leaf: leaves, life: lives, loaf: loaves, man: men, match: matches, mouse: mice, "
    "party: parties, peach: peaches, shelf: shelves, story: stories, thief: thieves, tooth: teeth, tree: trees, watch: "
    "watches, wife: wives, window: windows, wolf: wolves, woman: women"
)

LAST_NAMES = _split(
    "Adams Baker Brown Carter Clark Cook Davis Evans Fisher Green Hall Hill Jones King Lewis Miller Moore Parker Reed "
    "Scott Smith Taylor Turner Walker Ward White Wilson Wood Wright Young"
)

ROOMS = _split("attic bathroom bedroom cellar garage hall kitchen library office studio")

COUNTED = _split(
    "apples bananas beans beers burgers cakes carrots coffees cookies eggs lemons mangoes melons muffins onions oranges "
    "peaches pears pizzas plums potatoes salads sandwiches soups teas tomatoes waffles"
)

PRAISE = _split("brilliant excellent fantastic great lovely perfect superb wonderful")

BLAME = _split("awful bad disappointing dreadful horrible poor terrible useless")

REVIEWED = _split("book breakfast coffee film food garden hotel music pizza room service show soup staff trip view")

GLAD = ("We will come again.", "I recommend it.", "I was happy.", "Thank you so much.")

SORRY = ("Never again.", "I want my money back.", "I was angry.", "What a waste of time.")

REPORTS = {
    "sports": (
        "The {} team won the match by two goals.",
        "The runner from {} broke the record in the final race.",
        "{} scored three points in the last minute of the game.",
        "The coach of {} is pleased with the new players.",
    ),
    "weather": (
        "Heavy rain and strong wind are expected in {}.",
        "It will be sunny and warm in {} tomorrow.",
        "Snow fell all night in {}.",
        "Thick fog covered {} this morning, and it is cold.",
    ),
    "food": (
        "In {} we ate a soup with fresh bread and cheese.",
        "A cook from {} shows how to bake a chocolate cake.",
        "The restaurant in {} serves rice with vegetables.",
        "The best pizza is made in {}, with tomatoes and olives.",
    ),
    "music": (
        "The orchestra of {} plays two symphonies tonight.",
        "A singer from {} sold a million albums.",
        "The band from {} has a new song with guitar and drums.",
        "The pianist gave a concert in {}.",
    ),
}

VARIABLES = _split("age count index length level number price score size speed total value weight width year")

LISTS = _split("ages cities colors costs files items lines names numbers points prices rows scores users values words")
