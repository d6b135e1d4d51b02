//! Functions that submit work other than copies.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuGraphLaunch", &[(10000, "", 12), (10000, "_ptsz", 12)]),
    family("cuGraphUpload", &[(11010, "", 12), (11010, "_ptsz", 12)]),
    family("cuLaunch", &[(2000, "", 12)]),
    family("cuLaunchCooperativeKernel", &[(9000, "", 12), (9000, "_ptsz", 12)]),
    family("cuLaunchCooperativeKernelMultiDevice", &[(9000, "", 12)]),
    family("cuLaunchGrid", &[(2000, "", 12)]),
    family("cuLaunchGridAsync", &[(2000, "", 12)]),
    family("cuLaunchHostFunc", &[(10000, "", 12), (13010, "_v2", 13), (10000, "_ptsz", 12), (13010, "_v2_ptsz", 13)]),
    family("cuLaunchKernel", &[(4000, "", 12), (7000, "_ptsz", 12)]),
    family("cuLaunchKernelEx", &[(11060, "", 12), (11060, "_ptsz", 12)]),
    family("cuStreamAddCallback", &[(5000, "", 12), (7000, "_ptsz", 12)]),
    family("cuStreamAttachMemAsync", &[(6000, "", 12), (7000, "_ptsz", 12)]),
    family("cuStreamBatchMemOp", &[(8000, "", 12), (11070, "_v2", 12), (8000, "_ptsz", 12), (11070, "_v2_ptsz", 12)]),
    family("cuStreamWaitValue32", &[(8000, "", 12), (11070, "_v2", 12), (8000, "_ptsz", 12), (11070, "_v2_ptsz", 12)]),
    family("cuStreamWaitValue64", &[(9000, "", 12), (11070, "_v2", 12), (9000, "_ptsz", 12), (11070, "_v2_ptsz", 12)]),
    family("cuStreamWriteValue32", &[(8000, "", 12), (11070, "_v2", 12), (8000, "_ptsz", 12), (11070, "_v2_ptsz", 12)]),
    family("cuStreamWriteValue64", &[(9000, "", 12), (11070, "_v2", 12), (9000, "_ptsz", 12), (11070, "_v2_ptsz", 12)]),
];
