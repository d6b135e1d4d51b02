//! Functions that capture a stream's work, and related functions.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family(
        "cuStreamBeginCapture",
        &[(10000, "", 12), (10010, "_v2", 12), (10000, "_ptsz", 12), (10010, "_v2_ptsz", 12)],
    ),
    family("cuStreamBeginCaptureToCig", &[(13010, "", 13), (13010, "_ptsz", 13)]),
    family("cuStreamBeginCaptureToGraph", &[(12030, "", 12), (12030, "_ptsz", 12)]),
    family("cuStreamBeginRecaptureToGraph", &[(13030, "", 13), (13030, "_ptsz", 13)]),
    family("cuStreamEndCapture", &[(10000, "", 12), (10000, "_ptsz", 12)]),
    family("cuStreamEndCaptureToCig", &[(13010, "", 13), (13010, "_ptsz", 13)]),
    family(
        "cuStreamGetCaptureInfo",
        &[
            (10010, "", 12),
            (11030, "_v2", 12),
            (12030, "_v3", 12),
            (10010, "_ptsz", 12),
            (11030, "_v2_ptsz", 12),
            (12030, "_v3_ptsz", 12),
        ],
    ),
    family(
        "cuStreamUpdateCaptureDependencies",
        &[(11030, "", 12), (12030, "_v2", 12), (11030, "_ptsz", 12), (12030, "_v2_ptsz", 12)],
    ),
    family("cuThreadExchangeStreamCaptureMode", &[(10010, "", 12)]),
];
