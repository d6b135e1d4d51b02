//! Converts an allocation of a card to a daemon request for a tenant or a virtual machine.

use std::path::{Path, PathBuf};

use api::{AddTenant, AddVm, Labels};
use k8s_openapi::api::resource::v1::DeviceRequestAllocationResult;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::device::Offer;
use crate::parameters::Applied;
use crate::{DRIVER, MEMORY, TIME, WHOLE_CARD_PERMILLE, quantity};

/// The claim that a share belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim<'a> {
    /// Namespace of the claim.
    pub namespace: &'a str,
    /// Name of the claim.
    pub name: &'a str,
    /// UID of the claim.
    pub uid: &'a str,
    /// The pods for which the claim is reserved.
    pub pods: Vec<String>,
}

/// Body of a request to the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Body {
    /// A tenant of a CUDA card.
    Tenant(Box<AddTenant>),
    /// A virtual machine.
    Vm(Box<AddVm>),
}

impl Body {
    /// Returns the name of the tenant or virtual machine.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Tenant(spec) => &spec.name,
            Self::Vm(spec) => &spec.name,
        }
    }

    /// Returns the cards that the tenant or virtual machine uses.
    #[must_use]
    pub fn cards(&self) -> Vec<&str> {
        match self {
            Self::Tenant(spec) => spec.card_names(),
            Self::Vm(spec) => vec![&spec.card],
        }
    }

    /// Returns the labels of the tenant or virtual machine.
    #[must_use]
    pub fn labels(&self) -> &Labels {
        match self {
            Self::Tenant(spec) => &spec.labels,
            Self::Vm(spec) => &spec.labels,
        }
    }

    /// Returns the path of the request's collection in the admin API.
    #[must_use]
    pub fn collection(&self) -> &'static str {
        match self {
            Self::Tenant(_) => "/v1/tenants",
            Self::Vm(_) => "/v1/vms",
        }
    }
}

/// Returns the name of the tenant or virtual machine for share `number` of a claim.
#[must_use]
pub fn name(uid: &str, number: usize) -> String {
    format!("k8s-{uid}-{number}")
}

/// Returns the socket path of a share with one card. Each share has its own folder.
#[must_use]
pub fn socket(folder: &Path, name: &str, tenants: bool) -> PathBuf {
    folder.join(name).join(if tenants { "cuda.sock" } else { "vgpu.sock" })
}

/// An allocated device, and its card's offer.
pub type Given<'a> = (&'a DeviceRequestAllocationResult, &'a Offer);

/// Groups a claim's devices by share. All devices of a request for CUDA cards become one tenant, and every other device
/// is a separate share.
///
/// # Errors
/// Returns an error if a request for several CUDA cards got the same card twice.
pub fn grouped<'a>(given: Vec<Given<'a>>) -> Result<Vec<Vec<Given<'a>>>, String> {
    let mut groups: Vec<Vec<Given<'a>>> = Vec::new();
    for (result, offer) in given {
        let is_same = |group: &&mut Vec<Given<'a>>| {
            group.iter().all(|(first, card)| first.request == result.request && card.tenants && offer.tenants)
        };
        let Some(group) = groups.iter_mut().find(is_same) else {
            groups.push(vec![(result, offer)]);
            continue;
        };
        if group.iter().any(|(_, card)| card.card == offer.card) {
            return Err(format!(
                "request `{}`: several of its devices are the card `{}`, which is one device for programs; request one \
                 device with more capacity, or different cards with the constraint `distinctAttribute: {DRIVER}/card`",
                result.request, offer.card
            ));
        }
        group.push((result, offer));
    }
    Ok(groups)
}

/// The part of a card allocated to a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Allocated {
    memory_mib: u64,
    time_permille: u32,
}

/// The memory and time that a share gets from a card.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    vram_mib: u64,
    memory: Map<String, Value>,
    time: Value,
}

/// Computes a share's part of a card from the allocation and the parameters.
fn part((result, offer): Given<'_>, applied: &Applied) -> Result<Part, String> {
    let place = |what: String| format!("request `{}`, device `{}`: {what}", result.request, result.device);
    if result.admin_access == Some(true) {
        return Err(place("adminAccess gives no share of a card, expected a request without it".to_owned()));
    }
    let allocated = allocated(result, offer).map_err(place)?;
    let (vram_mib, memory) = memory(&allocated, offer, applied).map_err(place)?;
    let time = time(&allocated, applied).map_err(place)?;
    Ok(Part { vram_mib, memory, time })
}

/// Parses the allocation. If the cluster does not support partial capacities, the whole card is allocated.
fn allocated(result: &DeviceRequestAllocationResult, offer: &Offer) -> Result<Allocated, String> {
    let consumed = result.consumed_capacity.as_ref();
    let of = |name: &str| consumed.and_then(|consumed| consumed.get(name)).map(|quantity| quantity.0.as_str());
    let memory_mib = of(MEMORY).map_or(Ok(offer.memory_mib), quantity::mib);
    let memory_mib = memory_mib.map_err(|what| format!("allocated memory: {what}"))?;
    let time = of(TIME)
        .map_or(Ok(u64::from(WHOLE_CARD_PERMILLE)), quantity::whole)
        .map_err(|what| format!("allocated time: {what}"))?;
    let time_permille = u32::try_from(time).ok().filter(|time| (1..=WHOLE_CARD_PERMILLE).contains(time));
    let time_permille =
        time_permille.ok_or_else(|| format!("allocated time: {time}, expected 1 to {WHOLE_CARD_PERMILLE}"))?;
    if memory_mib == 0 || memory_mib > offer.memory_mib {
        return Err(format!(
            "allocated memory: {memory_mib} MiB, expected 1 to {} of card `{}`",
            offer.memory_mib, offer.card
        ));
    }
    Ok(Allocated { memory_mib, time_permille })
}

/// Creates the daemon request for share `number` of a claim. `given` must contain at least one device.
///
/// # Errors
/// Returns an error if a field of the request is too large or invalid, or if the devices have different parts. The
/// message names the field or the devices.
pub fn body(
    claim: &Claim<'_>,
    number: usize,
    given: &[Given<'_>],
    applied: &Applied,
    sockets: &Path,
) -> Result<Body, String> {
    let [(result, offer), others @ ..] = given else { return Err("a share without a device".to_owned()) };
    let place = |what: String| format!("request `{}`, device `{}`: {what}", result.request, result.device);
    let name = name(claim.uid, number);
    let part = part((result, offer), applied)?;
    for (other, of_other) in others {
        if self::part((other, of_other), applied)? != part {
            return Err(format!(
                "request `{}`: the parts of the devices `{}` and `{}` differ, expected equal parts, because a tenant has the same part \
                 of each of its cards; set capacity.requests to amounts that all cards have",
                result.request, result.device, other.device
            ));
        }
    }
    let Part { vram_mib, memory, time } = part;
    let mut body = json!({
        "name": name,
        "vram_mib": vram_mib,
        "memory": memory,
        "time": time,
        // Only containers that use the claim can access the folder. Inside such a container, any user can connect.
        "mode": "0666",
        "labels": labels(claim, result),
    });
    if others.is_empty() {
        body["card"] = offer.card.as_str().into();
        body["socket"] = json!(socket(sockets, &name, offer.tenants));
    } else {
        body["cards"] = given.iter().map(|(_, offer)| offer.card.as_str()).collect();
        // Each card has a socket in this folder.
        body["socket"] = json!(sockets.join(&name));
    }
    if let Some(group) = &applied.parameters.segment_group {
        if offer.tenants {
            return Err(place("segmentGroup, expected no such parameter for a CUDA card".to_owned()));
        }
        // Groups in different namespaces are separate.
        body["paravirtual"] = json!({ "offered": true, "group": format!("{}.{group}", claim.namespace) });
    }
    let parameters = &applied.parameters;
    if let Some(group) = &parameters.share_group {
        if !offer.tenants {
            return Err(place("shareGroup, expected no such parameter for a card of virtual machines".to_owned()));
        }
        if !others.is_empty() {
            return Err(place("shareGroup, expected no such parameter for a request of several cards".to_owned()));
        }
        body["share_group"] = format!("{}.{group}", claim.namespace).into();
    }
    if let Some(mode) = parameters.sharing {
        if parameters.share_group.is_none() {
            return Err(place("sharing, expected it together with shareGroup".to_owned()));
        }
        body["sharing"] = json!(mode);
    }
    match offer.tenants {
        true => parsed(body).map(|spec| Body::Tenant(Box::new(spec))),
        false => parsed(body).map(|spec| Body::Vm(Box::new(spec))),
    }
    .map_err(place)
}

fn parsed<T: DeserializeOwned>(body: Value) -> Result<T, String> {
    serde_json::from_value(body).map_err(|error| error.to_string())
}

fn labels(claim: &Claim<'_>, result: &DeviceRequestAllocationResult) -> Value {
    let cut = |text: &str| text.chars().take(200).collect::<String>();
    let mut labels = json!({
        "namespace": cut(claim.namespace),
        "claim": cut(claim.name),
        "claim_uid": claim.uid,
        "request": cut(&result.request),
    });
    if !claim.pods.is_empty() {
        labels["pod"] = cut(&claim.pods.join(",")).into();
    }
    labels
}

/// Returns a share's memory in MiB and the keys of its `memory` table.
fn memory(allocated: &Allocated, offer: &Offer, applied: &Applied) -> Result<(u64, Map<String, Value>), String> {
    let asked = &applied.parameters.memory;
    let size = |key: &str, quantity: &Option<String>| -> Result<Option<u64>, String> {
        let Some(quantity) = quantity else { return Ok(None) };
        let mib = quantity::mib(quantity).map_err(|what| format!("memory.{key}: {what}"))?;
        if mib.is_multiple_of(offer.chunk_mib) {
            return Ok(Some(mib));
        }
        let chunk = offer.chunk_mib;
        Err(format!(
            "memory.{key}: `{quantity}`, expected a multiple of {chunk}Mi, the allocation unit of card `{}`",
            offer.card
        ))
    };
    let limit = size("limit", &asked.limit)?.unwrap_or(allocated.memory_mib);
    if limit == 0 || limit > offer.memory_mib {
        return Err(format!(
            "memory.limit: {limit}Mi, expected at most the {}Mi of card `{}`",
            offer.memory_mib, offer.card
        ));
    }
    let most = allocated.memory_mib.min(limit);
    let guarantee = size("guarantee", &asked.guarantee)?.unwrap_or(most);
    if guarantee > most {
        return Err(format!(
            "memory.guarantee: {guarantee}Mi, expected at most {most}Mi: the allocated memory or the limit, whichever is lower"
        ));
    }
    let mut keys = Map::new();
    keys.insert("guarantee_mib".to_owned(), guarantee.into());
    if let Some(cap) = size("swapCap", &asked.swap_cap)? {
        keys.insert("swap_cap_mib".to_owned(), cap.into());
    }
    if let Some(weight) = asked.weight {
        bounded("memory.weight", weight, applied.memory_weight_of_claim, allocated)?;
        keys.insert("weight".to_owned(), weight.into());
    }
    if let Some(on_full) = asked.on_full {
        keys.insert("on_full".to_owned(), json!(on_full));
    }
    Ok((limit, keys))
}

/// Returns the keys of a share's `time` table.
fn time(allocated: &Allocated, applied: &Applied) -> Result<Value, String> {
    let asked = &applied.parameters.time;
    let weight = asked.weight.unwrap_or(allocated.time_permille);
    bounded("time.weight", weight, applied.time_weight_of_claim, allocated)?;
    let cap = asked.cap_permille.unwrap_or(WHOLE_CARD_PERMILLE);
    if !(1..=WHOLE_CARD_PERMILLE).contains(&cap) {
        return Err(format!("time.capPermille: {cap}, expected 1 to {WHOLE_CARD_PERMILLE}"));
    }
    let mut time = json!({
        "weight": weight,
        "guarantee_permille": allocated.time_permille.min(cap),
        "cap_permille": cap,
    });
    if let Some(class) = asked.class {
        time["class"] = json!(class);
    }
    Ok(time)
}

/// Checks a weight. A claim cannot set a weight above its allocated time.
fn bounded(key: &str, weight: u32, of_claim: bool, allocated: &Allocated) -> Result<(), String> {
    let most = if of_claim { allocated.time_permille } else { 10_000 };
    if (1..=most).contains(&weight) {
        return Ok(());
    }
    let why = if of_claim { ": the allocated time in thousandths; a device class can set more" } else { "" };
    Err(format!("{key}: {weight}, expected 1 to {most}{why}"))
}

#[cfg(test)]
mod tests;
