"""The vocabulary of made-up prompts: 512 short English words, each one token with its space in GPT-2-like vocabularies.

Checked against SmolLM2's; in most others nearly all are single tokens too, so that lengths asked for in tokens come out
close, and equal words give equal tokens wherever they stand. A run reports the token counts of the server beside those asked for.
"""

WORDS: tuple[str, ...] = tuple(
    """
about above action active add after again age agree air all allow alone along also among amount animal answer any
apply arm army around arrive art ask author away baby back bad bank basic battle bear beat become begin behind best
better big bird bit black blood body born bought box boy branch bridge bright brown burn but buy can car card care
cat cause center chair change child choose circle city claim clock close cloud cold come copy corner cost count
couple course cover create cup cut day dead deal deep depend die dinner direct divide does dollar door double dream
dress drink drive drop each earth east easy eat edge effect either enemy energy engine enjoy enough enter even event
every exact except face fact fair family far farm favor feed feel field fight figure film final fine finger finish
first fish five flat floor flow fly follow food foot for force forest found friend full gas get girl glad glass gold
good grand grass guide gun had hair hand happen happy has hat have heat heavy held help her here hill his hit hold
home hope hot house huge human hurry image inch inside into invent island judge keep kept king know lady land large
last law learn least leave left leg length less let letter like listen little log look lost lot love made magnet
make man many mark mass match matter mean meat meet melody member men method middle might mile milk mind mine minute
mix model month moon more most mouth move must name nation near neck need never new next night nine noise noon nor
north nose note now number offer office once open organ other our out over own page pair paper parent part party
past path pay people phrase piece plan planet plant play please plural poor port pose pound press proper prove
public pull put quiet quite race rain raise range rather reach read ready real reason record red repeat reply rest
result rich ride right ring river rock roll rose round rule run safe sail sand sat save saw say school score sea
season seat see seed seem select self send sense sent serve set settle seven share sharp sheet shell shine ship shoe
show side sight sign silent since sing single sister six skill sky slow small smell smile snow soft soil son soon
sound south space speed spend spoke stand star start state stay steam steel stick still stone street study suffix
suit summer sun supply swim symbol system table tail take talk tall teach team tell ten test than thank the their
there these they thick thin thing think third this those though three thus tiny too tool top touch toward town trade
train travel trip truck true try tube two under usual vary verb very view visit voice walk wall want war wash watch
water wave went west when where which white who why wide wife win wind window wing winter wire with woman women
wonder word work world would write year yes yet you young your
""".split()  # noqa: SIM905 (a list of 512 quoted words fills 512 lines)
)
"""Frozen: another word or order makes other prompts from the same seed."""
