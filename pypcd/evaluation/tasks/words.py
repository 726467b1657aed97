"""Words and plain facts that everyday questions are made of. General knowledge, written down for this purpose."""

from __future__ import annotations

__all__ = [
    "ADJECTIVES",
    "ANIMALS",
    "BELONGINGS",
    "BLAME",
    "CAPITALS",
    "CITIES",
    "COLOURS",
    "CONTINENTS",
    "COUNTED",
    "DAYS",
    "FIRMS",
    "FOODS",
    "GLAD",
    "INSTRUMENTS",
    "KNOWN",
    "LAST_NAMES",
    "LISTS",
    "MONTHS",
    "NAMES",
    "OPPOSITES",
    "PAST",
    "PETS",
    "PLURALS",
    "PRAISE",
    "PROFESSIONS",
    "REPORTS",
    "REVIEWED",
    "ROOMS",
    "SORRY",
    "STREETS",
    "THINGS",
    "VARIABLES",
    "VEGETABLES",
    "WEATHER",
    "WILD_ANIMALS",
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

BELONGINGS = _split(
    "bell blanket broom bucket candle clock drum guitar hammer jacket ladder lamp mirror pillow rope scarf shovel tent "
    "vase wagon wheel"
)

PETS = _split("cat chicken donkey duck goat horse lizard mouse parrot pig pigeon rabbit sheep snake turtle")

VEGETABLES = _split(
    "beans cabbage carrots celery cucumbers garlic lentils lettuce onions peas pumpkins radishes spinach tomatoes"
)

WEATHER = _split("breeze dew drizzle fog frost hail heat mist rain snow storm sunshine thunder wind")

WILD_ANIMALS = _split(
    "bear crow deer duck eagle fox frog goat goose hawk lizard monkey owl parrot pigeon seal snake swan turtle wolf"
)

INSTRUMENTS = _split("accordion cello clarinet drums flute guitar harp oboe organ piano saxophone trumpet violin")

STREETS = _split(
    "Abbey Acorn Apple Beech Birch Bridge Brook Castle Cedar Chapel Cherry Chestnut Church Copper Elm Falcon Garden Harbour "
    "Hazel Ivy Kingfisher Linden Maple Market Meadow Mill Moss Museum Oak Orchard Poplar Priory Queen Raven Rose Sandy School "
    "Silver Spring Station Swan Temple Thistle Valley Willow Windmill"
)

FIRMS = (
    "Amberfield Printing", "Bluebird Books", "Brightwater Shipping", "Cloverleaf Foods", "Copperhill Tools",
    "Eastgate Insurance", "Evergreen Paper", "Fairwind Travel", "Goldcrest Watches", "Greystone Cement", "Highmoor Wool",
    "Ironbridge Steel", "Lakeside Dairy", "Larkspur Textiles", "Moonlight Films", "Northstar Software", "Oakfield Furniture",
    "Pinecone Toys", "Quickstep Shoes", "Redwood Timber", "Riverbend Ceramics", "Seagull Ferries", "Silverline Trams",
    "Stonebridge Glass", "Summerhill Tea", "Sunrise Solar", "Thornbury Bicycles", "Westport Freight", "Whitecliff Salt",
    "Wildflower Honey",
)  # fmt: skip

KNOWN = (
    ("What is the capital of France?", "The capital of France is", "Paris", "", "capital"),
    ("What is the capital of Italy?", "The capital of Italy is", "Rome", "", "capital"),
    ("What is the capital of Spain?", "The capital of Spain is", "Madrid", "", "capital"),
    ("What is the capital of Germany?", "The capital of Germany is", "Berlin", "", "capital"),
    ("What is the capital of Japan?", "The capital of Japan is", "Tokyo", "", "capital"),
    ("What is the capital of Greece?", "The capital of Greece is", "Athens", "", "capital"),
    ("What is the capital of Portugal?", "The capital of Portugal is", "Lisbon", "", "capital"),
    ("What is the capital of Austria?", "The capital of Austria is", "Vienna", "", "capital"),
    ("What is the capital of Poland?", "The capital of Poland is", "Warsaw", "", "capital"),
    ("What is the capital of Russia?", "The capital of Russia is", "Moscow", "", "capital"),
    ("What is the capital of Egypt?", "The capital of Egypt is", "Cairo", "", "capital"),
    ("What is the capital of Ireland?", "The capital of Ireland is", "Dublin", "", "capital"),
    ("What is the capital of Norway?", "The capital of Norway is", "Oslo", "", "capital"),
    ("What is the capital of Sweden?", "The capital of Sweden is", "Stockholm", "", "capital"),
    ("What is the capital of Denmark?", "The capital of Denmark is", "Copenhagen", "", "capital"),
    ("What is the capital of Finland?", "The capital of Finland is", "Helsinki", "", "capital"),
    ("What is the capital of Hungary?", "The capital of Hungary is", "Budapest", "", "capital"),
    ("What is the capital of Canada?", "The capital of Canada is", "Ottawa", "", "capital"),
    ("What is the capital of China?", "The capital of China is", "Beijing", "", "capital"),
    ("What is the capital of Cuba?", "The capital of Cuba is", "Havana", "", "capital"),
    ("What is the capital of Peru?", "The capital of Peru is", "Lima", "", "capital"),
    ("What is the capital of Kenya?", "The capital of Kenya is", "Nairobi", "", "capital"),
    ("What is the capital of Thailand?", "The capital of Thailand is", "Bangkok", "", "capital"),
    ("What is the capital of the United Kingdom?", "The capital of the United Kingdom is", "London", "", "capital"),
    ("How many months does a year have?", "The number of months in a year is", "12", "twelve", "number"),
    ("How many days does a week have?", "The number of days in a week is", "7", "seven", "number"),
    ("How many hours does a day have?", "The number of hours in a day is", "24", "twenty-four", "number"),
    ("How many minutes does an hour have?", "The number of minutes in an hour is", "60", "sixty", "number"),
    ("How many seconds does a minute have?", "The number of seconds in a minute is", "60", "sixty", "number"),
    ("How many legs does a spider have?", "The number of legs of a spider is", "8", "eight", "number"),
    ("How many legs does an insect have?", "The number of legs of an insect is", "6", "six", "number"),
    ("How many legs does a dog have?", "The number of legs of a dog is", "4", "four", "number"),
    ("How many sides does a triangle have?", "The number of sides of a triangle is", "3", "three", "number"),
    ("How many sides does a hexagon have?", "The number of sides of a hexagon is", "6", "six", "number"),
    (
        "How many letters does the English alphabet have?",
        "The number of letters in the English alphabet is",
        "26",
        "twenty-six",
        "number",
    ),
    ("How many centimetres make a metre?", "The number of centimetres in a metre is", "100", "hundred", "number"),
    ("How many metres make a kilometre?", "The number of metres in a kilometre is", "1000", "thousand", "number"),
    ("How many eggs are in a dozen?", "The number of eggs in a dozen is", "12", "twelve", "number"),
    ("How many wheels does a bicycle have?", "The number of wheels of a bicycle is", "2", "two", "number"),
    ("How many strings does a violin have?", "The number of strings of a violin is", "4", "four", "number"),
    ("How much is seven times eight?", "Seven times eight is", "56", "fifty-six", "number"),
    ("How much is twenty minus five?", "Twenty minus five is", "15", "fifteen", "number"),
    ("What is the opposite of hot?", "The opposite of hot is", "cold", "", "opposite"),
    ("What is the opposite of north?", "The opposite of north is", "south", "", "opposite"),
    ("What is the opposite of left?", "The opposite of left is", "right", "", "opposite"),
    ("What is the opposite of up?", "The opposite of up is", "down", "", "opposite"),
    ("What is the opposite of day?", "The opposite of day is", "night", "", "opposite"),
    ("What is the opposite of yes?", "The opposite of yes is", "no", "", "opposite"),
    ("What is the opposite of full?", "The opposite of full is", "empty", "", "opposite"),
    ("What is the opposite of east?", "The opposite of east is", "west", "", "opposite"),
    ("What is the opposite of true?", "The opposite of true is", "false", "", "opposite"),
    ("What is the opposite of wet?", "The opposite of wet is", "dry", "", "opposite"),
    ("Which day comes after Monday?", "The day after Monday is", "Tuesday", "", "day"),
    ("Which day comes after Wednesday?", "The day after Wednesday is", "Thursday", "", "day"),
    ("Which day comes after Friday?", "The day after Friday is", "Saturday", "", "day"),
    ("Which day comes before Monday?", "The day before Monday is", "Sunday", "", "day"),
    ("What is the first month of the year?", "The first month of the year is", "January", "", "month"),
    ("What is the last month of the year?", "The last month of the year is", "December", "", "month"),
    ("Which month comes after June?", "The month after June is", "July", "", "month"),
    ("Which month comes before October?", "The month before October is", "September", "", "month"),
    ("Which is the shortest month of the year?", "The shortest month of the year is", "February", "", "month"),
    ("What colour is fresh snow?", "The colour of fresh snow is", "white", "", "colour"),
    ("What colour is a ripe banana?", "The colour of a ripe banana is", "yellow", "", "colour"),
    ("What colour is human blood?", "The colour of human blood is", "red", "", "colour"),
    ("What colour is fresh grass?", "The colour of fresh grass is", "green", "", "colour"),
    (
        "Which colour do blue and yellow paint give when they are mixed?",
        "Blue and yellow paint, when they are mixed, give",
        "green",
        "",
        "colour",
    ),
    ("What is a young dog called?", "A young dog is called a", "puppy", "", "young"),
    ("What is a young cat called?", "A young cat is called a", "kitten", "", "young"),
    ("What is a young cow called?", "A young cow is called a", "calf", "", "young"),
    ("What is a young sheep called?", "A young sheep is called a", "lamb", "", "young"),
    (
        "What is a young frog called, while it still has a tail and gills?",
        "A young frog with a tail and gills is called a",
        "tadpole",
        "",
        "young",
    ),
    ("Which insects make honey?", "Honey is made by", "bees", "honeybees", "maker"),
    (
        'Which animal gives us wool and says "baa"?',
        'The animal that gives us wool and says "baa" is the',
        "sheep",
        "",
        "maker",
    ),
    ('Which animal says "meow"?', 'The animal that says "meow" is the', "cat", "", "animal"),
    ("Which land animal has a trunk?", "The land animal that has a trunk is the", "elephant", "", "animal"),
    (
        "Which animal has a very long neck and is the tallest of all?",
        "The tallest animal is the",
        "giraffe",
        "",
        "animal",
    ),
    (
        "Which African animal looks like a horse with black and white stripes?",
        "The African animal with black and white stripes is the",
        "zebra",
        "",
        "animal",
    ),
    ("On which planet do we live?", "The planet that we live on is", "Earth", "", "planet"),
    ("Which planet is nearest to the sun?", "The planet nearest to the sun is", "Mercury", "", "planet"),
    (
        "Which is the largest planet of the solar system?",
        "The largest planet of the solar system is",
        "Jupiter",
        "",
        "planet",
    ),
    ("Which planet is called the red planet?", "The red planet is", "Mars", "", "planet"),
    ("On which continent is France?", "France is on the continent of", "Europe", "", "continent"),
    ("On which continent is Kenya?", "Kenya is on the continent of", "Africa", "", "continent"),
    ("On which continent is China?", "China is on the continent of", "Asia", "", "continent"),
    ("Which language do most people in Brazil speak?", "Most people in Brazil speak", "Portuguese", "", "language"),
    ("Which language do most people in Mexico speak?", "Most people in Mexico speak", "Spanish", "", "language"),
    ("Which language do most people in Germany speak?", "Most people in Germany speak", "German", "", "language"),
    ("Which language do most people in Italy speak?", "Most people in Italy speak", "Italian", "", "language"),
    (
        'Who wrote the play "Romeo and Juliet"?',
        'The play "Romeo and Juliet" was written by William',
        "Shakespeare",
        "",
        "author",
    ),
    ('Who painted the "Mona Lisa"?', 'The "Mona Lisa" was painted by Leonardo da', "Vinci", "", "author"),
    (
        "Which scientist found the theory of relativity?",
        "The theory of relativity was found by Albert",
        "Einstein",
        "",
        "author",
    ),
    ('What is the past tense of the verb "go"?', 'The past tense of the verb "go" is', "went", "", "word"),
    ('What is the plural of the noun "child"?', 'The plural of the noun "child" is', "children", "", "word"),
    ('What is the plural of the noun "mouse", the animal?', 'The plural of the noun "mouse" is', "mice", "", "word"),
    ("What does water become when it freezes?", "When it freezes, water becomes", "ice", "", "thing"),
    (
        "In which season does it snow most, in the north of Europe?",
        "In the north of Europe it snows most in",
        "winter",
        "",
        "thing",
    ),
    ("With which organ do we see?", "The organ that we see with is the", "eye", "eyes", "thing"),
    (
        "Which gas do we need from the air to live?",
        "The gas that we need from the air to live is",
        "oxygen",
        "",
        "thing",
    ),
)
"""Questions of general knowledge: a question, the beginning of its answer, the answer, another form of it or "", and a group.
The other answers of a group are wrong ones."""
