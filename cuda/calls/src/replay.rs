//! Defines how each call is handled when a program continues in another worker, which replays some of the calls.
//!
//! The handling of calls that create or destroy an object with a handle follows from their description. `RULES`, `WORK`
//! and `NOTHING` define it for the other calls. A test fails if a call has no defined handling, so that a new call is
//! not forgotten.

use crate::describe::{Arg, Call, Kind, Treatment};
use crate::own;

/// Handling of a successful call in a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    /// The call has no lasting effect, like queries and completed copies.
    Nothing,
    /// The call adds work to a stream. The work has a lasting effect only in a capture.
    Work,
    /// The call begins a capture.
    BeginsCapture,
    /// The call ends a capture, and its new handle refers to the graph.
    EndsCapture,
    /// The call creates the object that its new handle refers to.
    Creates,
    /// The call destroys the object whose handle is its [`Arg::Drop`] argument.
    Destroys,
    /// The call changes an object.
    Changes(Change),
    /// The call allocates memory. The first result is the address.
    Allocates,
    /// The call frees the memory or the reservation whose address is the first argument.
    Frees,
    /// The call releases the primary context of the device in the first argument.
    EndsPrimary,
    /// The call creates an object that cannot be recreated. The object prevents a replay while it exists.
    Refused(Ended),
}

/// The object that a call changes, and the changed part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Index of the message word with the object's handle, or `None` if the call changes the program or the context.
    pub target: Option<u8>,
    /// Bit mask of the message words that identify the changed part: a later call with the same values in these words
    /// replaces an earlier one. `None` if other objects may depend on the earlier value.
    pub part: Option<u16>,
}

/// Identification of an object that cannot be recreated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The new object's handle.
    ByHandle,
    /// The address in the first result.
    ByAddress,
    /// The driver's number in the first result.
    ByNumber,
    /// The object whose handle is in the message word with this index, because its state cannot be restored.
    With(u8),
    /// The object exists until the program exits.
    Never,
}

const fn changes(target: Option<u8>, part: Option<u16>) -> Replay {
    Replay::Changes(Change { target, part })
}

/// Handling that does not follow from a call's description.
const RULES: &[(&str, Replay)] = &[
    ("cuInit", changes(None, Some(0))),
    ("cuCtxSetLimit", changes(None, Some(1))),
    ("cuCtxSetCacheConfig", changes(None, Some(0))),
    ("cuCtxSetSharedMemConfig", changes(None, Some(0))),
    ("cuDevicePrimaryCtxSetFlags_v2+", changes(None, Some(1))),
    ("cuDevicePrimaryCtxRelease_v2+", Replay::EndsPrimary),
    ("cuDevicePrimaryCtxReset_v2+", Replay::EndsPrimary),
    ("nvmlInit_v2+", changes(None, Some(0))),
    // Memory.
    ("cuMemAlloc_v2+", Replay::Allocates),
    ("cuMemAllocPitch_v2+", Replay::Allocates),
    ("cuMemAllocAsync+", Replay::Allocates),
    ("cuMemAllocFromPoolAsync+", Replay::Allocates),
    ("cuMemFree_v2+", Replay::Frees),
    ("cuMemFree_v2-", Replay::Frees),
    ("cuMemFreeAsync", Replay::Frees),
    ("cuMemAddressFree", Replay::Frees),
    ("cuMemPoolSetAttribute", changes(Some(0), Some(0b11))),
    ("cuMemPoolSetAccess", changes(Some(0), None)),
    ("cuDeviceSetMemPool", changes(Some(1), Some(1))),
    // The contents of memory that the program maps itself are not copied. Such mappings require a reservation.
    ("cuMemAddressReserve", Replay::Refused(Ended::ByAddress)),
    ("cuMemCreate", Replay::Refused(Ended::ByHandle)),
    ("cuMemRetainAllocationHandle", Replay::Refused(Ended::ByHandle)),
    // The contents of arrays are not copied either.
    ("cuArrayCreate_v2", Replay::Refused(Ended::ByHandle)),
    ("cuArray3DCreate_v2", Replay::Refused(Ended::ByHandle)),
    ("cuArrayGetPlane", Replay::Refused(Ended::ByHandle)),
    ("cuMipmappedArrayCreate", Replay::Refused(Ended::ByHandle)),
    ("cuMipmappedArrayGetLevel", Replay::Refused(Ended::ByHandle)),
    // The driver chooses these numbers, and kernels get them as parameters.
    ("cuTexObjectCreate", Replay::Refused(Ended::ByNumber)),
    ("cuSurfObjectCreate", Replay::Refused(Ended::ByNumber)),
    // The driver chooses the addresses of variables, and programs store them.
    ("cuModuleGetGlobal_v2+", Replay::Refused(Ended::With(1))),
    ("cuLibraryGetGlobal+", Replay::Refused(Ended::With(2))),
    ("cuLibraryGetManaged+", Replay::Refused(Ended::Never)),
    ("cuLinkCreate_v2+", Replay::Refused(Ended::ByHandle)),
    ("cuStreamBeginCapture", Replay::BeginsCapture),
    ("cuStreamBeginCapture_v2", Replay::BeginsCapture),
    ("cuStreamEndCapture", Replay::EndsCapture),
    // The source may have changed since the call.
    ("cuStreamCopyAttributes", Replay::Refused(Ended::With(0))),
    ("cuGraphKernelNodeCopyAttributes", Replay::Refused(Ended::With(0))),
    ("cuStreamSetAttribute", changes(Some(0), Some(0b11))),
    // Functions.
    ("cuKernelSetCacheConfig", changes(Some(0), Some(0b101))),
    ("cuKernelSetAttribute+", changes(Some(2), Some(0b1101))),
    ("cuFuncSetAttribute+", changes(Some(0), Some(0b11))),
    ("cuFuncSetCacheConfig", changes(Some(0), Some(1))),
    ("cuFuncSetSharedMemConfig", changes(Some(0), Some(1))),
    ("cuFuncLoad", changes(Some(0), Some(1))),
    // Graphs: an executable graph depends on the values at its instantiation.
    ("cuGraphAddDependencies", changes(Some(0), None)),
    ("cuGraphEventRecordNodeSetEvent", changes(Some(0), None)),
    ("cuGraphEventWaitNodeSetEvent", changes(Some(0), None)),
    ("cuGraphMemsetNodeSetParams", changes(Some(0), None)),
    ("cuGraphMemcpyNodeSetParams+", changes(Some(0), None)),
    ("cuGraphKernelNodeSetAttribute", changes(Some(0), None)),
    ("cuGraphExecUpdate_v2", changes(Some(0), Some(1))),
    ("cuGraphExecEventRecordNodeSetEvent", changes(Some(0), Some(0b11))),
    ("cuGraphExecEventWaitNodeSetEvent", changes(Some(0), Some(0b11))),
    ("cuGraphExecChildGraphNodeSetParams", changes(Some(0), Some(0b11))),
    ("cuGraphExecMemsetNodeSetParams", changes(Some(0), Some(0b11))),
    ("cuGraphExecMemcpyNodeSetParams+", changes(Some(0), Some(0b11))),
    ("cuGraphNodeSetEnabled", changes(Some(0), Some(0b11))),
];

/// Calls that add work to the stream whose handle is an argument.
const WORK: &[&str] = &[
    "cuStreamWaitEvent",
    "cuStreamWriteValue32_v2",
    "cuStreamWriteValue64_v2",
    "cuStreamWaitValue32_v2",
    "cuStreamWaitValue64_v2",
    // The times of recorded events are lost. The log rejects a replay if they may be needed.
    "cuEventRecord",
    "cuEventRecordWithFlags",
    "cuGraphLaunch",
];

/// Name prefixes of calls that add work to a stream if they have a stream argument.
const WORK_BEGINS: &[&str] = &["cuMemset", "cuMemcpy"];

/// Calls without a lasting effect: queries, and work on the card.
const NOTHING: &[&str] = &[
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceGetUuid_v2",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetByPCIBusId",
    "cuDeviceComputeCapability",
    "cuDeviceGetProperties",
    "cuDeviceCanAccessPeer",
    "cuDeviceGetP2PAttribute",
    "cuCtxGetStreamPriorityRange",
    "cuCtxGetLimit",
    "cuCtxGetCacheConfig",
    "cuCtxGetSharedMemConfig",
    "cuCtxResetPersistingL2Cache",
    "cuMemGetInfo_v2",
    "cuMemGetAddressRange_v2",
    "cuMemPoolTrimTo",
    "cuMemPoolGetAttribute",
    "cuMemPoolGetAccess",
    "cuDeviceGraphMemTrim",
    "cuDeviceGetGraphMemAttribute",
    // These calls need a handle or a reservation, which prevents a replay.
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetAccess",
    "cuMemGetAllocationGranularity",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuStreamQuery",
    "cuStreamGetFlags",
    "cuStreamGetPriority",
    "cuStreamGetId",
    "cuStreamGetDevice",
    "cuStreamGetAttribute",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuEventElapsedTime_v2",
    "cuStreamIsCapturing",
    "cuGraphUpload",
    "cuGraphExecGetFlags",
    "cuGraphNodeGetType",
    "cuModuleGetFunctionCount",
    "cuLibraryGetKernelCount",
    "cuFuncGetParamInfo",
    "cuKernelGetParamInfo",
    "cuFuncGetParamCount",
    "cuFuncIsLoaded",
    "cuKernelGetParamCount",
    "cuDevicePrimaryCtxGetState+",
    "cuDeviceGetCount+",
    "cuDeviceGetAttribute+",
    "cuDriverGetVersion+",
    "cuKernelGetAttribute+",
    "cuFuncGetAttribute+",
    "cuPointerGetAttribute+",
    "cuGraphGetNodes+",
    "cuStreamGetCaptureInfo_v2+",
    "cuStreamGetCaptureInfo_v3+",
    "cuCtxGetApiVersion+",
    "cuCtxGetExecAffinity",
    "cuGraphNodeGetEnabled",
    "cuGraphKernelNodeGetAttribute",
    "cuTensorMapEncodeTiled",
    "cuTensorMapReplaceAddress",
    "cuArrayGetDescriptor_v2",
    "cuArray3DGetDescriptor_v2",
    "cuArrayGetMemoryRequirements",
    "cuMipmappedArrayGetMemoryRequirements",
    // The link prevents a replay.
    "cuLinkAddData_v2+",
];

/// Name prefixes of calls without a lasting effect.
const NOTHING_BEGINS: &[&str] = &["cuMemset", "cuMemcpy", "cuOccupancy", "nvmlSystemGet", "nvmlDeviceGet"];

/// Returns how a described call is replayed, or `None` if this is undefined.
pub fn replay(call: &Call) -> Option<Replay> {
    if call.treatment == Treatment::Guest {
        return Some(Replay::Nothing);
    }
    if let Some((_, rule)) = RULES.iter().find(|(name, _)| *name == call.name) {
        return Some(*rule);
    }
    for arg in call.args {
        match arg {
            Arg::New(_) => return Some(Replay::Creates),
            Arg::Drop(_) | Arg::DropNumber(_) => return Some(Replay::Destroys),
            _ => {}
        }
    }
    let has_stream = call.args.contains(&Arg::Handle(Kind::Stream));
    if WORK.contains(&call.name) || has_stream && WORK_BEGINS.iter().any(|begin| call.name.starts_with(begin)) {
        return Some(Replay::Work);
    }
    let has_none = NOTHING.contains(&call.name) || NOTHING_BEGINS.iter().any(|begin| call.name.starts_with(begin));
    has_none.then_some(Replay::Nothing)
}

/// Returns how a message of [`own`] is replayed. `edit` is the message's first word.
pub fn replay_own(op: u16, edit: Option<u64>) -> Option<Replay> {
    Some(match (op, edit) {
        // A new worker is started separately, and each step of a replay contains its image.
        (own::START | own::IMAGE_PART, _) => Replay::Nothing,
        (own::WAIT_STREAM | own::WAIT_EVENT | own::WAIT_CONTEXT, _) => Replay::Nothing,
        (own::MAX_CLUSTERS | own::FUNCTION_NAME, _) => Replay::Nothing,
        (own::LAUNCH | own::HOST_FUNCTION, _) => Replay::Work,
        (own::COPY_INLINE | own::COPY_IN | own::COPY_OUT | own::COPY_BOX, _) => Replay::Nothing,
        (own::FUNCTION_INFO, _) => changes(Some(0), Some(1)),
        (own::PIN, _) => Replay::Creates,
        (own::UNPIN, _) => Replay::Destroys,
        (own::STAGING, _) => changes(None, Some(0)),
        (own::GRAPH_KERNEL | own::GRAPH_HOST, Some(own::edit::ADD)) => Replay::Creates,
        (own::GRAPH_KERNEL | own::GRAPH_HOST, Some(own::edit::SET)) => changes(Some(2), None),
        (own::GRAPH_KERNEL | own::GRAPH_HOST, _) => changes(Some(1), Some(0b111)),
        // The link prevents a replay.
        (own::LINK_COMPLETE | own::LINK_READ, _) => Replay::Nothing,
        _ => return None,
    })
}

/// Returns the kind of the handle that a call creates, and the index of its message word.
pub fn created(call: &Call) -> Option<(Kind, usize)> {
    call.args.iter().enumerate().find_map(|(at, arg)| match arg {
        Arg::New(kind) => Some((*kind, at)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CALLS, MAX_ARGUMENTS};

    #[test]
    fn each_call_has_a_treatment_for_replays() {
        let missing: Vec<_> = CALLS.iter().filter(|call| replay(call).is_none()).map(|call| call.name).collect();
        assert!(missing.is_empty(), "add these calls to `RULES` or `NOTHING`: {missing:?}");
        for op in own::FIRST..=own::LINK_READ {
            assert!(replay_own(op, Some(0)).is_some(), "message {op:#x} has no defined handling");
        }
        assert_eq!(replay_own(own::LINK_READ + 1, None), None, "the test does not cover a new message");
    }

    #[test]
    fn rules_name_calls_that_exist_and_words_that_they_have() {
        for (name, rule) in RULES {
            let call = CALLS.iter().find(|call| call.name == *name);
            let call = call.unwrap_or_else(|| panic!("{name} is not a described call"));
            assert!(call.treatment != Treatment::Guest, "{name}");
            let target = match rule {
                Replay::Changes(Change { target: Some(target), .. }) | Replay::Refused(Ended::With(target)) => {
                    Some(target)
                }
                _ => None,
            };
            if let Some(target) = target {
                // Results have no message word, except those that may be null.
                let worded = call.args.iter().filter(|arg| !matches!(arg, Arg::Out(_)));
                let args: Vec<&Arg> = worded.take(usize::from(*target) + 1).collect();
                let is_word = |arg: &&Arg| matches!(arg, Arg::Word | Arg::Handle(_) | Arg::OutOptional(_));
                assert!(args.iter().all(is_word) && matches!(args.last(), Some(Arg::Handle(_))), "{name}");
            }
            if let Replay::Refused(Ended::ByHandle) = rule {
                assert!(created(call).is_some(), "{name}");
            }
        }
        for name in WORK {
            let call = CALLS.iter().find(|call| call.name == *name);
            let call = call.unwrap_or_else(|| panic!("{name} is not a described call"));
            assert!(call.args.contains(&Arg::Handle(Kind::Stream)), "{name} has no stream");
            assert!(!NOTHING.contains(name) && !RULES.iter().any(|(rule, _)| rule == name), "{name} is handled twice");
        }
        for name in NOTHING {
            let call = CALLS.iter().find(|call| call.name == *name);
            let call = call.unwrap_or_else(|| panic!("{name} is not a described call"));
            let makes = |arg: &Arg| matches!(arg, Arg::New(_) | Arg::Drop(_) | Arg::NewNumber(_) | Arg::DropNumber(_));
            assert!(!call.args.iter().any(makes), "{name} creates or destroys an object");
            assert!(!RULES.iter().any(|(rule, _)| rule == name), "{name} is handled twice");
        }
    }

    #[test]
    fn handle_of_a_new_object_is_a_word_of_the_message() {
        for call in CALLS.iter().filter(|call| replay(call) == Some(Replay::Creates)) {
            let (_, at) = created(call).expect("a handle");
            assert!(at < MAX_ARGUMENTS, "{}", call.name);
            let words_before = call.args.iter().take(at);
            let longer = |arg: &Arg| matches!(arg, Arg::Word | Arg::Handle(_) | Arg::Array(..));
            assert!(words_before.into_iter().all(longer), "{}", call.name);
        }
    }
}
