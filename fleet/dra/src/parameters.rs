//! Parameters for this driver in a claim or device class (`opaque.parameters`), and the rules for combining them.

use k8s_openapi::api::resource::v1::DeviceAllocationConfiguration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::DRIVER;

/// Version of the parameters.
pub const API_VERSION: &str = "gpu-mediator.internal/v1";
/// Kind of the parameters.
pub const KIND: &str = "ShareParameters";
/// Maximum number of parameter sets that are combined.
const MAX_SETS: usize = 64;

/// Settings of a share that differ from its allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShareParameters {
    /// `gpu-mediator.internal/v1`.
    pub api_version: String,
    /// `ShareParameters`.
    pub kind: String,
    /// Memory of the share.
    #[serde(default, skip_serializing_if = "Memory::is_silent")]
    pub memory: Memory,
    /// Time of the share.
    #[serde(default, skip_serializing_if = "Time::is_silent")]
    pub time: Time,
    /// Virtual machines in the same namespace and with the same group can share memory segments. Rejected for CUDA
    /// cards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment_group: Option<String>,
    /// Shares in the same namespace and with the same group trust each other: their programs can use a CUDA card
    /// concurrently. Rejected for other cards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_group: Option<String>,
    /// Mode in which the share group uses the card. If shares have different modes, the strictest mode applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Mode>,
}

/// Mode of a share group, strictest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The shares take turns, each with exclusive access.
    Turns,
    /// The default: the mode in which the programs make more progress.
    Auto,
    /// Programs use the card concurrently.
    Together,
}

/// Memory of a share. Sizes are quantities such as `8Gi`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Memory {
    /// Guaranteed memory on the card. The default and the maximum are the allocated memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guarantee: Option<String>,
    /// Maximum memory on the card, at most the card's memory. Memory above the guarantee is available only while other
    /// shares do not need it. The default is the allocated memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// Maximum host memory for data that does not fit in card memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_cap: Option<String>,
    /// Weight of the share relative to other shares when memory is scarce. A claim can set at most its allocated time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Behaviour when the card has no free memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_full: Option<OnFull>,
}

/// Time of a share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Time {
    /// Weight of the share. The default is its allocated time in thousandths. A claim cannot set a larger weight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Maximum time in thousandths, even if the card is otherwise idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cap_permille: Option<u32>,
    /// Latency class. Among shares that are due, the best class runs first. Only a device class can set `interactive`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<Class>,
}

impl Memory {
    fn is_silent(&self) -> bool {
        *self == Self::default()
    }
}

impl Time {
    fn is_silent(&self) -> bool {
        *self == Self::default()
    }
}

/// Behaviour of a share that needs memory when the card has no free memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnFull {
    /// The share's data is placed in host memory.
    Swap,
    /// The share's work waits.
    Queue,
    /// The share's allocations fail if their memory cannot be reserved.
    Refuse,
}

/// Latency class. Among shares that are due, the best class runs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Runs before all other classes.
    Interactive,
    /// The default class.
    Normal,
    /// Runs after all other classes.
    Background,
}

/// Author of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Author {
    /// The cluster's administrators.
    Class,
    /// Any user with permission to create claims.
    Claim,
}

/// The combined parameters of a request. Weights set by a claim are marked, because they are limited to the allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The combined parameters.
    pub parameters: ShareParameters,
    /// Set if the claim has set a weight for time.
    pub time_weight_of_claim: bool,
    /// Set if the claim has set a weight for memory.
    pub memory_weight_of_claim: bool,
}

/// Combines the parameter sets that apply to a request. The claim's sets take precedence over those of the device
/// class.
///
/// # Errors
/// Returns an error if a set is invalid, or if there are too many sets. The message names the set and the problem.
pub fn applied(sets: &[DeviceAllocationConfiguration], request: &str) -> Result<Applied, String> {
    let ours = sets.iter().filter_map(|set| {
        let opaque = set.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER)?;
        let requests = set.requests.as_deref().unwrap_or_default();
        // Names of subrequests have the form `REQUEST/NAME`. A set for a request also applies to its subrequests.
        let main = request.split('/').next().unwrap_or(request);
        let meant = requests.is_empty() || requests.iter().any(|name| name == request || name == main);
        meant.then_some((set.source.as_str(), &opaque.parameters.0))
    });
    let mut applied = Applied::default();
    let mut sets: Vec<_> = ours.take(MAX_SETS + 1).collect();
    if sets.len() > MAX_SETS {
        return Err(format!("more than {MAX_SETS} sets of parameters for request `{request}`"));
    }
    sets.sort_by_key(|(source, _)| *source != "FromClass");
    for (source, value) in sets {
        let author = if source == "FromClass" { Author::Class } else { Author::Claim };
        let set = ShareParameters::deserialize(value)
            .map_err(|error| format!("parameters for request `{request}` ({source}): {error}"))?;
        if set.api_version != API_VERSION || set.kind != KIND {
            return Err(format!(
                "parameters for request `{request}` ({source}): `{}` of `{}`, expected `{KIND}` of `{API_VERSION}`",
                set.kind, set.api_version
            ));
        }
        if author == Author::Claim && set.time.class == Some(Class::Interactive) {
            return Err(format!(
                "parameters for request `{request}`: time.class `interactive`, expected `normal` or `background`: only a device \
                 class can set `interactive`"
            ));
        }
        overlay(&mut applied, set, author);
    }
    Ok(applied)
}

/// Adds a set, which takes precedence over the sets before it.
fn overlay(applied: &mut Applied, set: ShareParameters, author: Author) {
    let ShareParameters { api_version, kind, memory, time, segment_group, share_group, sharing } = set;
    let of_claim = author == Author::Claim;
    applied.time_weight_of_claim = time.weight.map_or(applied.time_weight_of_claim, |_| of_claim);
    applied.memory_weight_of_claim = memory.weight.map_or(applied.memory_weight_of_claim, |_| of_claim);
    let now = &mut applied.parameters;
    (now.api_version, now.kind) = (api_version, kind);
    let Memory { guarantee, limit, swap_cap, weight, on_full } = memory;
    now.memory.guarantee = guarantee.or(now.memory.guarantee.take());
    now.memory.limit = limit.or(now.memory.limit.take());
    now.memory.swap_cap = swap_cap.or(now.memory.swap_cap.take());
    now.memory.weight = weight.or(now.memory.weight);
    now.memory.on_full = on_full.or(now.memory.on_full);
    let Time { weight, cap_permille, class } = time;
    now.time.weight = weight.or(now.time.weight);
    now.time.cap_permille = cap_permille.or(now.time.cap_permille);
    now.time.class = class.or(now.time.class);
    now.segment_group = segment_group.or(now.segment_group.take());
    now.share_group = share_group.or(now.share_group.take());
    now.sharing = sharing.or(now.sharing);
}

/// Returns the JSON schema of the parameters.
///
/// # Errors
/// Returns an error if the schema cannot be serialized as JSON.
pub fn schema() -> serde_json::Result<String> {
    let schema = schemars::schema_for!(ShareParameters);
    serde_json::to_string_pretty(&schema).map(|text| text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::resource::v1::OpaqueDeviceConfiguration;
    use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
    use serde_json::{Value, json};

    fn set(source: &str, requests: &[&str], mut parameters: Value) -> DeviceAllocationConfiguration {
        if let Some(table) = parameters.as_object_mut().filter(|table| !table.contains_key("kind")) {
            table.insert("apiVersion".to_owned(), API_VERSION.into());
            table.insert("kind".to_owned(), KIND.into());
        }
        let opaque = OpaqueDeviceConfiguration { driver: DRIVER.to_owned(), parameters: RawExtension(parameters) };
        DeviceAllocationConfiguration {
            opaque: Some(opaque),
            requests: (!requests.is_empty()).then(|| requests.iter().map(|&name| name.to_owned()).collect()),
            source: source.to_owned(),
        }
    }

    #[test]
    fn a_claim_goes_before_a_class_whatever_their_order() {
        let of_class = set(
            "FromClass",
            &[],
            json!({ "memory": { "limit": "8Gi", "weight": 5 }, "time": { "weight": 7, "class": "interactive" } }),
        );
        let of_claim = set("FromClaim", &["gpu"], json!({ "memory": { "limit": "4Gi", "swapCap": "1Gi" } }));
        let other = set("FromClaim", &["another"], json!({ "memory": { "limit": "1Gi" } }));
        let mut foreign = set("FromClaim", &[], json!({ "anything": true }));
        foreign.opaque.as_mut().unwrap().driver = "another.example.com".to_owned();
        let sets = [of_claim, other, foreign, of_class];
        let found = applied(&sets, "gpu").unwrap();
        assert_eq!(found.parameters.memory.limit.as_deref(), Some("4Gi"));
        assert_eq!(found.parameters.memory.swap_cap.as_deref(), Some("1Gi"));
        assert_eq!((found.parameters.memory.weight, found.parameters.time.weight), (Some(5), Some(7)));
        assert!(!found.time_weight_of_claim && !found.memory_weight_of_claim);
        assert_eq!(applied(&sets, "gpu/big").unwrap().parameters.memory.limit.as_deref(), Some("4Gi"));
        assert_eq!(applied(&sets, "third").unwrap().parameters.memory.limit.as_deref(), Some("8Gi"));
        assert_eq!(applied(&[], "gpu").unwrap(), Applied::default());
    }

    #[test]
    fn a_weight_is_known_to_be_the_claims() {
        let class = set("FromClass", &[], json!({ "time": { "weight": 7 } }));
        let claim = set("FromClaim", &[], json!({ "time": { "weight": 9 }, "memory": { "weight": 3 } }));
        let found = applied(&[class, claim], "gpu").unwrap();
        assert_eq!(found.parameters.time.weight, Some(9));
        assert!(found.time_weight_of_claim && found.memory_weight_of_claim);
    }

    #[test]
    fn invalid_parameters_are_rejected_with_cause() {
        let error = |parameters| applied(&[set("FromClaim", &[], parameters)], "gpu").unwrap_err();
        assert!(error(json!({ "memroy": {} })).contains("unknown field `memroy`"));
        assert!(error(json!({ "memory": { "weight": -1 } })).contains("request `gpu` (FromClaim)"));
        assert!(error(json!({ "memory": { "onFull": "explode" } })).contains("unknown variant `explode`"));
        assert!(error(json!({ "time": { "class": "interactive" } })).contains("only a device class"));
        assert!(error(json!({ "kind": "Other", "apiVersion": API_VERSION })).contains("expected `ShareParameters`"));
        assert!(error(json!([])).contains("request `gpu`"));
        let many: Vec<_> = (0..=MAX_SETS).map(|_| set("FromClaim", &[], json!({}))).collect();
        assert!(applied(&many, "gpu").unwrap_err().contains("more than 64"));
    }

    #[test]
    fn the_published_schema_is_that_of_the_type() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../kubernetes/share-parameters.schema.json");
        let published = std::fs::read_to_string(path).unwrap();
        assert!(
            published == schema().unwrap(),
            "gpu-mediator-dra schema > fleet/kubernetes/share-parameters.schema.json"
        );
    }
}
