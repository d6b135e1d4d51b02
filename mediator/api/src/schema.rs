//! OpenAPI document of the admin API, generated from its message types.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::launch::{MemorySize, Vmm};

/// Function that returns the schema of a type, and adds nested types to the generator's definitions.
type Schema = fn(&mut SchemaGenerator) -> Value;

/// Status code and body of a successful response.
type Answer = (u16, Option<Schema>);

/// Request of the API.
struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    query: &'static [Parameter],
    body: Option<Schema>,
    answer: Answer,
    /// True if the request accepts an expected revision.
    if_match: bool,
}

/// Query parameter of a request: name, description and type.
type Parameter = (&'static str, &'static str, Schema);

fn schema_of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<T>().to_value()
}

/// Returns the schema of a table that may contain any subset of its keys. The schema has no required keys, and no
/// defaults: a generated client would send defaults for keys that must stay unchanged.
fn part_of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    let whole = schema_of::<T>(generator);
    let name = whole["$ref"].as_str().and_then(|path| path.rsplit('/').next()).unwrap_or_default().to_owned();
    let mut part = generator.definitions().get(&name).cloned().unwrap_or_default();
    if let Some(part) = part.as_object_mut() {
        part.remove("required");
        part.insert("description".to_owned(), format!("Keys of `{name}` to change.").into());
        let keys = part.get_mut("properties").and_then(Value::as_object_mut);
        keys.into_iter().flatten().for_each(|(_, key)| drop(key.as_object_mut().and_then(|key| key.remove("default"))));
    }
    let part_name = format!("{}Patch", name.trim_end_matches(|digit: char| digit.is_ascii_digit()));
    generator.definitions_mut().insert(part_name.clone(), part);
    json!({ "$ref": format!("#/components/schemas/{part_name}") })
}

const NONE: &[Parameter] = &[];
const WINDOW: &[Parameter] =
    &[("window_ms", "window over which received shares are measured, in ms, from 100 to 60000", schema_of::<u64>)];
const SINCE: &[Parameter] = &[("since_ms", "time span up to now, in ms, from 100 to 60000", schema_of::<u64>)];
const RECORD: &[Parameter] = &[("for_ms", "duration of the recording, in ms, from 1 to 60000", schema_of::<u64>)];
const LAUNCH: &[Parameter] =
    &[("vmm", "VMM", schema_of::<Vmm>), ("memory", "RAM of the guest", schema_of::<MemorySize>)];
const APPLY: &[Parameter] = &[
    ("prune", "remove virtual machines and tenants that are not in the document", schema_of::<bool>),
    ("dry_run", "only determine the changes, without making them", schema_of::<bool>),
];
const EVENTS: &[Parameter] = &[
    ("after", "cursor after which to start: `next` or `cursor` of an earlier response", schema_of::<String>),
    ("limit", "maximum number of events per page, from 1 to 1024; 256 by default", schema_of::<u64>),
    ("wait_s", "maximum wait for an event if there is none, in seconds, from 0 to 60", schema_of::<u64>),
    ("follow", "stream pages as events occur, one per line, as application/jsonl", schema_of::<bool>),
];
const COMPARE: &[Parameter] =
    &[("exact", "also report virtual machines and tenants that are not in the document", schema_of::<bool>)];

const fn get(path: &'static str, summary: &'static str, query: &'static [Parameter], answer: Schema) -> Operation {
    Operation { method: "get", path, summary, query, body: None, answer: (200, Some(answer)), if_match: false }
}

const fn change(
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    body: Option<Schema>,
    answer: Answer,
) -> Operation {
    Operation { method, path, summary, query: NONE, body, answer, if_match: true }
}

/// Creates an operation for an action that does not change an operator's settings.
const fn act(
    path: &'static str,
    summary: &'static str,
    query: &'static [Parameter],
    body: Option<Schema>,
    answer: Answer,
) -> Operation {
    Operation { query, if_match: false, ..change("post", path, summary, body, answer) }
}

/// All requests except `/metrics`, whose response is not JSON.
const OPERATIONS: [Operation; 46] = [
    get("/v1/tenants", "All tenants of CUDA cards", NONE, schema_of::<crate::TenantList>),
    change(
        "post",
        "/v1/tenants",
        "Adds a tenant",
        Some(schema_of::<crate::AddTenant>),
        (201, Some(schema_of::<crate::Tenant>)),
    ),
    change("delete", "/v1/tenants/{name}", "Removes a tenant", None, (204, None)),
    get("/v1/tenants/{name}", "One tenant", NONE, schema_of::<crate::Tenant>),
    change(
        "patch",
        "/v1/tenants/{name}",
        "Changes a tenant's share of its card",
        Some(schema_of::<crate::TenantPatch>),
        (200, Some(schema_of::<crate::Tenant>)),
    ),
    act(
        "/v1/tenants/{name}/lease",
        "Changes a tenant's share of its card until the client process of this connection ends",
        NONE,
        Some(schema_of::<crate::TenantPatch>),
        (200, Some(schema_of::<crate::Tenant>)),
    ),
    change(
        "post",
        "/v1/tenants/{name}/move",
        "Moves a tenant with its programs to another card",
        Some(schema_of::<crate::MoveTo>),
        (200, Some(schema_of::<crate::TenantMoved>)),
    ),
    get(
        "/v1/profiles",
        "All profiles, with the number of further instances that fit on each card",
        NONE,
        schema_of::<crate::ProfileList>,
    ),
    get("/v1/profiles/{name}", "One profile", NONE, schema_of::<crate::Profile>),
    get("/v1/vms", "All virtual machines", NONE, schema_of::<crate::VmList>),
    change(
        "post",
        "/v1/vms",
        "Adds a virtual machine",
        Some(schema_of::<crate::AddVm>),
        (201, Some(schema_of::<crate::Vm>)),
    ),
    get("/v1/vms/{name}", "A virtual machine", NONE, schema_of::<crate::Vm>),
    change("delete", "/v1/vms/{name}", "Removes a virtual machine", None, (204, None)),
    get("/v1/vms/{name}/launch-args", "VMM arguments for a virtual machine", LAUNCH, schema_of::<crate::LaunchArgs>),
    get("/v1/vms/{name}/time", "A virtual machine's share of its card's time", NONE, schema_of::<crate::VmTime>),
    change(
        "patch",
        "/v1/vms/{name}/time",
        "Changes a virtual machine's share of its card's time",
        Some(part_of::<crate::VmTime>),
        (200, Some(schema_of::<crate::VmTime>)),
    ),
    act("/v1/vms/{name}/release", "Releases a virtual machine from quarantine", NONE, None, (204, None)),
    change(
        "post",
        "/v1/vms/{name}/move",
        "Moves a virtual machine to another card while it runs",
        Some(schema_of::<crate::MoveTo>),
        (200, Some(schema_of::<crate::Moved>)),
    ),
    act(
        "/v1/vms/{name}/save",
        "Saves the vGPU of a virtual machine with its memory; the virtual machine is paused meanwhile, and the data is complete if the response ends cleanly",
        NONE,
        None,
        (200, None),
    ),
    act(
        "/v1/vms/{name}/restore",
        "Restores the vGPU of a virtual machine from a saved state",
        NONE,
        None,
        (200, Some(schema_of::<crate::Restored>)),
    ),
    act(
        "/v1/vms/{name}/workers/restart",
        "Continues the CUDA programs of a virtual machine in new workers",
        NONE,
        Some(schema_of::<crate::RestartWorkers>),
        (200, Some(schema_of::<crate::WorkerRestarts>)),
    ),
    get("/v1/daemon", "The daemon", NONE, schema_of::<crate::DaemonInfo>),
    act(
        "/v1/daemon/upgrade",
        "Replaces this daemon with the program at its path, which takes over all virtual machines; this daemon then exits",
        NONE,
        None,
        (200, Some(schema_of::<crate::Upgraded>)),
    ),
    get("/v1/events", "Events after a cursor, or from the oldest event", EVENTS, schema_of::<crate::EventPage>),
    get("/v1/cards", "All cards", NONE, schema_of::<crate::CardList>),
    get("/v1/cards/{name}", "One card", NONE, schema_of::<crate::Card>),
    change(
        "post",
        "/v1/cards/{name}/drain",
        "Drains a card: it accepts no new virtual machines or tenants, and its virtual machines are moved to other cards",
        None,
        (200, Some(schema_of::<crate::DrainReport>)),
    ),
    change(
        "post",
        "/v1/cards/{name}/undrain",
        "Lets a card accept virtual machines and tenants again",
        None,
        (200, Some(schema_of::<crate::Card>)),
    ),
    get("/v1/schedulers", "Time sharing of all cards", WINDOW, schema_of::<crate::SchedulerList>),
    get("/v1/cards/{name}/scheduler", "Time sharing of a card", WINDOW, schema_of::<crate::CardScheduler>),
    change(
        "patch",
        "/v1/cards/{name}/scheduler",
        "Changes the time sharing of a card",
        Some(part_of::<sched::Config>),
        (200, Some(schema_of::<crate::CardScheduler>)),
    ),
    get("/v1/cards/{name}/scheduler/history", "Use of a card over time", SINCE, schema_of::<crate::SchedulerHistory>),
    act(
        "/v1/cards/{name}/scheduler/record",
        "Records the events and decisions of a card's scheduler; the response consists of lines of JSON, of media type \
             application/jsonl",
        RECORD,
        None,
        (200, None),
    ),
    get("/v1/memory", "Memory placement of all cards", NONE, schema_of::<crate::MemoryList>),
    get("/v1/cards/{name}/memory", "Memory placement of a card", NONE, schema_of::<crate::CardMemory>),
    change(
        "patch",
        "/v1/cards/{name}/memory",
        "Changes the memory settings of a card",
        Some(part_of::<crate::CardMemorySettings>),
        (200, Some(schema_of::<crate::CardMemory>)),
    ),
    get(
        "/v1/vms/{name}/memory",
        "A virtual machine's share of its card's memory",
        NONE,
        schema_of::<crate::VmMemorySettings>,
    ),
    change(
        "patch",
        "/v1/vms/{name}/memory",
        "Changes a virtual machine's share of its card's memory",
        Some(part_of::<crate::VmMemorySettings>),
        (200, Some(schema_of::<crate::VmMemorySettings>)),
    ),
    act(
        "/v1/vms/{name}/memory/evict",
        "Moves memory of a virtual machine to host memory",
        NONE,
        Some(schema_of::<crate::MoveRequest>),
        (200, Some(schema_of::<crate::MoveReport>)),
    ),
    act(
        "/v1/vms/{name}/memory/return",
        "Moves memory of a virtual machine back to the card",
        NONE,
        Some(schema_of::<crate::MoveRequest>),
        (200, Some(schema_of::<crate::MoveReport>)),
    ),
    act(
        "/v1/vms/{name}/memory/accesses",
        "Counts accesses to a guest's VRAM during a given time",
        RECORD,
        None,
        (200, Some(schema_of::<crate::AccessProfile>)),
    ),
    act(
        "/v1/vms/{name}/memory/hints",
        "Sets hints about ranges of a guest's VRAM",
        NONE,
        Some(schema_of::<crate::Hints>),
        (204, None),
    ),
    get("/v1/desired", "All changeable state; the ETag is its revision", NONE, schema_of::<crate::Exported>),
    Operation {
        query: APPLY,
        ..change(
            "patch",
            "/v1/desired",
            "Applies a desired state",
            Some(schema_of::<crate::Desired>),
            (200, Some(schema_of::<crate::Applied>)),
        )
    },
    act(
        "/v1/desired/compare",
        "Compares the current state with a desired state",
        COMPARE,
        Some(schema_of::<crate::Desired>),
        (200, Some(schema_of::<crate::Comparison>)),
    ),
    get("/v1/schema", "This document", NONE, |_| json!({ "type": "object" })),
];

/// Tags of the operations: name, description, and the first path components that they apply to.
const TAGS: [(&str, &str, &[&str]); 5] = [
    ("vms", "Virtual machines", &["vms"]),
    ("tenants", "Tenants of CUDA cards", &["tenants"]),
    ("profiles", "Named sets of limits for virtual machines and tenants", &["profiles"]),
    ("cards", "Cards, with their time and memory", &["cards", "schedulers", "memory"]),
    ("daemon", "The daemon, its desired state and its metrics", &["daemon", "desired", "events", "schema", "metrics"]),
];

impl Operation {
    /// Returns the path components after the version, excluding object names.
    fn parts(&self) -> Vec<&'static str> {
        self.path.split('/').filter(|part| !["", "v1", "{name}"].contains(part)).collect()
    }

    /// Returns the name of the operation in generated clients: a verb and an object, such as `get_vm_memory` or
    /// `drain_card`.
    fn id(&self) -> String {
        let mut parts: Vec<String> = self.parts().iter().map(|part| part.replace('-', "_")).collect();
        let adds = self.method == "post" && parts.len() == 1;
        if let Some(first) = parts.first_mut().filter(|_| adds || self.path.contains("{name}"))
            && let Some(one) = first.strip_suffix('s')
        {
            *first = one.to_owned();
        }
        let verb = match self.method {
            "post" if adds => "add".to_owned(),
            "post" => parts.pop().unwrap_or_default(),
            "patch" => "change".to_owned(),
            "delete" => "remove".to_owned(),
            method => method.to_owned(),
        };
        format!("{verb}_{}", parts.join("_"))
    }

    fn tag(&self) -> &'static str {
        let first = self.parts().first().copied().unwrap_or_default();
        TAGS.iter().find(|(_, _, parts)| parts.contains(&first)).map_or("daemon", |(tag, _, _)| tag)
    }

    /// Returns the possible error status codes, with their descriptions.
    fn refusals(&self) -> Vec<(u16, &'static str)> {
        let changes = self.method != "get";
        let named = self.path.contains("{name}");
        let values = self.body.is_some() || !self.query.is_empty();
        let all = [
            (400, "a value is invalid", values || changes),
            (403, "the socket is read-only", changes),
            (404, "no object has this name", named || self.body.is_some()),
            (409, "the state of an object prevents the action, or the revision differs", changes),
            (422, "the body lacks a key, or a key has the wrong type", self.body.is_some()),
            (507, "the card does not have enough resources left", changes),
        ];
        all.into_iter().filter(|(_, _, may)| *may).map(|(status, description, _)| (status, description)).collect()
    }

    fn parameters(&self, generator: &mut SchemaGenerator) -> Vec<Value> {
        let mut parameters = Vec::new();
        if self.path.contains("{name}") {
            parameters.push(json!({
                "name": "name", "in": "path", "required": true, "schema": { "type": "string" }
            }));
        }
        for (name, description, schema) in self.query {
            let schema = schema(generator);
            parameters.push(json!({ "name": name, "in": "query", "description": description, "schema": schema }));
        }
        if self.if_match {
            parameters.push(json!({
                "name": "If-Match",
                "in": "header",
                "description": "expected revision, in double quotes; a conflict if the current revision differs",
                "schema": { "type": "string" },
            }));
        }
        parameters
    }

    fn describe(&self, generator: &mut SchemaGenerator) -> Value {
        let content = |schema: Value| json!({ "application/json": { "schema": schema } });
        let (status, answer) = self.answer;
        let mut good = json!({ "description": "done" });
        if let Some(answer) = answer {
            good["content"] = content(answer(generator));
        }
        let error = schema_of::<crate::Error>(generator);
        let bad = |description: &str| json!({ "description": description, "content": content(error.clone()) });
        let mut described = json!({
            "operationId": self.id(),
            "tags": [self.tag()],
            "summary": self.summary,
            "responses": { "default": bad("failed") },
        });
        for (status, description) in self.refusals() {
            described["responses"][status.to_string()] = bad(description);
        }
        described["responses"][status.to_string()] = good;
        let parameters = self.parameters(generator);
        if !parameters.is_empty() {
            described["parameters"] = parameters.into();
        }
        if let Some(body) = self.body {
            described["requestBody"] = json!({ "required": true, "content": content(body(generator)) });
        }
        described
    }
}

/// Returns the OpenAPI document.
#[must_use]
pub fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for operation in &OPERATIONS {
        let described = operation.describe(&mut generator);
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = described;
    }
    paths.insert(
        "/metrics".to_owned(),
        json!({ "get": {
            "operationId": "get_metrics",
            "tags": ["daemon"],
            "summary": "Metrics",
            "responses": { "200": {
                "description": "Prometheus text format",
                "content": { "text/plain": { "schema": { "type": "string" } } },
            } },
        } }),
    );
    // Saved virtual machines, scheduler recordings and event streams are not single JSON documents.
    let stream = json!({ "application/octet-stream": { "schema": { "type": "string", "format": "binary" } } });
    if let Some(record) = paths.get_mut("/v1/cards/{name}/scheduler/record") {
        record["post"]["responses"]["200"]["content"] =
            json!({ "application/jsonl": { "schema": { "type": "string" } } });
    }
    if let Some(events) = paths.get_mut("/v1/events") {
        events["get"]["responses"]["200"]["content"]["application/jsonl"] = json!({ "schema": { "type": "string" } });
    }
    if let Some(save) = paths.get_mut("/v1/vms/{name}/save") {
        save["post"]["responses"]["200"]["content"] = stream.clone();
    }
    if let Some(restore) = paths.get_mut("/v1/vms/{name}/restore") {
        restore["post"]["requestBody"] = json!({ "required": true, "content": stream });
    }
    let tags: Vec<Value> =
        TAGS.iter().map(|(name, description, _)| json!({ "name": name, "description": description })).collect();
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "gpu-mediator",
            "version": "1",
            "description": "The admin API of mediatord, over its UNIX socket. Within /v1, keys are added but not renamed or removed.",
        },
        "servers": [{ "url": "http://localhost", "description": "UNIX socket; the host name is ignored" }],
        "tags": tags,
        "paths": paths,
        "components": { "schemas": generator.take_definitions(true) },
    });
    name_values(&mut document);
    document
}

/// Converts a choice among constants to an enumeration, which generated clients represent as a type.
fn name_values(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(name_values),
        Value::Object(keys) => {
            if let Some((values, described)) = keys.get("oneOf").and_then(constants) {
                keys.remove("oneOf");
                keys.insert("type".to_owned(), "string".into());
                keys.insert("enum".to_owned(), values.into());
                let before = keys.get("description").and_then(Value::as_str).map(|text| format!("{text}\n\n"));
                let text = format!("{}{}", before.unwrap_or_default(), described.join("\n"));
                keys.insert("description".to_owned(), text.trim_end().into());
            }
            keys.values_mut().for_each(name_values);
        }
        _ => {}
    }
}

/// Returns the values of a choice that has only string constants, and a text with each value and its description.
fn constants(choice: &Value) -> Option<(Vec<Value>, Vec<String>)> {
    let (mut values, mut described) = (Vec::new(), Vec::new());
    for one in choice.as_array()? {
        let about = one.get("description").and_then(Value::as_str).unwrap_or_default();
        let several = one.get("enum").and_then(Value::as_array).cloned();
        for value in several.or_else(|| Some(vec![one.get("const")?.clone()]))? {
            described.push(format!("{}: {about}", value.as_str()?));
            values.push(value);
        }
    }
    Some((values, described))
}
