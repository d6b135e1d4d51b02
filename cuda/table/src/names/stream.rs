//! Functions for streams.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuStreamCopyAttributes", &[(11000, "", 12), (11000, "_ptsz", 12)]),
    family("cuStreamCreate", &[(2000, "", 12)]),
    family("cuStreamCreateWithPriority", &[(5050, "", 12)]),
    family("cuStreamDestroy", &[(2000, "", 12), (4000, "_v2", 12)]),
    family("cuStreamGetAttribute", &[(11000, "", 12), (11000, "_ptsz", 12)]),
    family("cuStreamGetCtx", &[(9020, "", 12), (12050, "_v2", 12), (9020, "_ptsz", 12), (12050, "_v2_ptsz", 12)]),
    family("cuStreamGetDevResource", &[(13010, "", 13), (13010, "_ptsz", 13)]),
    family("cuStreamGetDevice", &[(12080, "", 12), (12080, "_ptsz", 12)]),
    family("cuStreamGetFlags", &[(5050, "", 12), (7000, "_ptsz", 12)]),
    family("cuStreamGetGreenCtx", &[(12040, "", 12)]),
    family("cuStreamGetId", &[(12000, "", 12), (12000, "_ptsz", 12)]),
    family("cuStreamGetPriority", &[(5050, "", 12), (7000, "_ptsz", 12)]),
    family("cuStreamIsCapturing", &[(10000, "", 12), (10000, "_ptsz", 12)]),
    family("cuStreamQuery", &[(2000, "", 12), (7000, "_ptsz", 12)]),
    family("cuStreamSetAttribute", &[(11000, "", 12), (11000, "_ptsz", 12)]),
    family("cuStreamSynchronize", &[(2000, "", 12), (7000, "_ptsz", 12)]),
    family("cuStreamWaitEvent", &[(3020, "", 12), (7000, "_ptsz", 12)]),
];
