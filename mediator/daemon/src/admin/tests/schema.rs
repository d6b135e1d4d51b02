//! Tests of the published API document: it matches the types, and the daemon's responses conform to it.

use super::*;
use crate::fixture::{copy, guest, one_card};
use api::schema::document;
use jsonschema::{Draft, Validator};
use serde_json::{Value, json};

/// Published API document.
const PUBLISHED: &str = include_str!("../../../../../docs/reference/api.json");

/// Returns a validator for one part of the document.
fn validator(schema: &Value) -> Validator {
    let mut schema = schema.clone();
    schema["components"] = document()["components"].clone();
    jsonschema::options().with_draft(Draft::Draft202012).build(&schema).unwrap()
}

fn check(schema: &Value, value: &Value, what: &str) {
    let errors: Vec<_> =
        validator(schema).iter_errors(value).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(errors.is_empty(), "{what}: {errors:#?}\n{value:#}");
}

/// Returns the schema of a successful response to a request.
fn answer_schema(method: &str, path: &str) -> Value {
    let document = document();
    let responses = &document["paths"][path][method]["responses"];
    let good = responses.as_object().unwrap().iter().find(|(status, _)| status.starts_with('2')).unwrap().1;
    good["content"]["application/json"]["schema"].clone()
}

#[test]
fn published_document_is_that_of_the_types() {
    let published: Value = serde_json::from_str(PUBLISHED).unwrap();
    assert_eq!(published, document(), "update it with `cargo xtask docs`");
}

/// Calls `see` with every object in a JSON document.
fn visit(value: &Value, see: &mut impl FnMut(&serde_json::Map<String, Value>)) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| visit(item, see)),
        Value::Object(keys) => {
            see(keys);
            keys.values().for_each(|value| visit(value, see));
        }
        _ => {}
    }
}

#[test]
fn document_has_all_that_generated_clients_need() {
    let document = document();
    let tags: Vec<_> = document["tags"].as_array().unwrap().iter().map(|tag| tag["name"].clone()).collect();
    assert!(document["servers"][0]["url"].is_string());
    let mut ids = std::collections::BTreeSet::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(ids.insert(id.to_owned()), "{method} {path}: duplicate operation ID {id}");
            assert!(id.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{id}");
            assert!(tags.contains(&operation["tags"][0]), "{method} {path}");
            let responses = operation["responses"].as_object().unwrap();
            let has = |status: &str| responses.contains_key(status);
            assert_eq!(
                has("404"),
                path.contains("{name}") || operation["requestBody"]["content"]["application/json"].is_object()
            );
            assert_eq!(has("409") && has("403"), method != "get", "{method} {path}");
            for body in responses.values().chain(operation.get("requestBody")) {
                for (media, content) in body["content"].as_object().into_iter().flatten() {
                    assert!(content["schema"].is_object(), "{method} {path}: {media}");
                }
            }
        }
    }
    for id in
        ["get_vms", "add_vm", "get_vm", "remove_vm", "change_vm_memory", "move_vm", "evict_vm_memory", "add_tenant"]
    {
        assert!(ids.contains(id), "{id} in {ids:?}");
    }
    visit(&document, &mut |keys| {
        let choice = keys.get("oneOf").and_then(Value::as_array).into_iter().flatten();
        let constants = choice.filter(|one| one.get("const").is_some()).count();
        assert_eq!(constants, 0, "a choice among constants is not an enumeration: {keys:?}");
    });
    let states = &document["components"]["schemas"]["VmState"];
    assert_eq!(states["enum"], json!(["starting", "waiting", "connected", "stopping", "failed"]), "{states}");
}

#[test]
fn server_accepts_exactly_documented_methods() {
    let served = one_card("");
    let client = served.client();
    let document = document();
    let references = document.to_string().matches("#/components/schemas/").count();
    assert!(references > 30, "{references}");
    for (path, operations) in document["paths"].as_object().unwrap() {
        let at = path.replace("{name}", "nothing");
        for method in [Method::GET, Method::POST, Method::PATCH, Method::DELETE, Method::PUT] {
            let described = operations.get(method.as_str().to_lowercase()).is_some();
            let error = match client.request(method.clone(), &at, "{".into()) {
                Ok(_) => continue,
                Err(ClientError::Ask(admin_client::AskError::Refused(error))) => error,
                Err(error) => panic!("{method} {path}: {error}"),
            };
            let other = error.error.starts_with("there is no `/") || error.error.contains("does not accept");
            assert_eq!(other, !described, "{method} {path}: {error:?}");
            let whole = json!({ "$ref": "#/components/schemas/Error" });
            check(&whole, &serde_json::to_value(&error).unwrap(), &format!("{method} {path}"));
        }
    }
}

#[test]
fn answers_of_a_daemon_at_work_go_by_the_document() {
    let served = one_card("time = { copy_mib_per_s = 64 }\n");
    let client = served.client();
    let send = |method: &str, path: &str, at: &str, body: Value| {
        let bytes = if body.is_null() { Default::default() } else { body.to_string().into() };
        let method_of = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
        if !body.is_null() {
            let document = document();
            let schema = &document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"];
            check(schema, &body, &format!("body of {method} {path}"));
        }
        let answer = client.request(method_of, at, bytes).unwrap_or_else(|error| panic!("{method} {at}: {error}"));
        if answer.is_empty() {
            assert_eq!(answer_schema(method, path), Value::Null, "{method} {path}");
            return;
        }
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        check(&answer_schema(method, path), &answer, &format!("{method} {path}"));
    };
    let vm = json!({ "name": "a", "card": "card0", "vram_mib": 16, "time": { "weight": 7 }, "mode": "0600" });
    send("post", "/v1/vms", "/v1/vms", vm);
    let (mut driver, mut channel) = guest(&served, "a");
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    for (path, at) in [
        ("/v1/vms", "/v1/vms"),
        ("/v1/vms/{name}", "/v1/vms/a"),
        ("/v1/vms/{name}/launch-args", "/v1/vms/a/launch-args?vmm=cloud-hypervisor&memory=1G"),
        ("/v1/vms/{name}/time", "/v1/vms/a/time"),
        ("/v1/cards", "/v1/cards"),
        ("/v1/cards/{name}", "/v1/cards/card0"),
        ("/v1/schedulers", "/v1/schedulers?window_ms=60000"),
        ("/v1/cards/{name}/scheduler", "/v1/cards/card0/scheduler"),
        ("/v1/cards/{name}/scheduler/history", "/v1/cards/card0/scheduler/history"),
        ("/v1/desired", "/v1/desired"),
        ("/v1/schema", "/v1/schema"),
    ] {
        send("get", path, at, Value::Null);
    }
    send("patch", "/v1/vms/{name}/time", "/v1/vms/a/time", json!({ "weight": 9, "max_run_ms": 500 }));
    send("patch", "/v1/cards/{name}/scheduler", "/v1/cards/card0/scheduler", json!({ "band": { "wait_ns": 5 } }));
    send("post", "/v1/vms/{name}/release", "/v1/vms/a/release", Value::Null);
    let desired = json!({ "vm": [{ "name": "b", "card": "card0", "vram_mib": 16 }] });
    send("post", "/v1/desired/compare", "/v1/desired/compare?exact=true", desired.clone());
    send("patch", "/v1/desired", "/v1/desired?dry_run=true&prune=true", desired);
    send("delete", "/v1/vms/{name}", "/v1/vms/a", Value::Null);
}

#[test]
fn schema_validator_rejects_mismatched_answer() {
    let schema = answer_schema("get", "/v1/vms");
    assert!(!validator(&schema).is_valid(&json!({ "vms": [{ "name": 5 }] })));
    assert!(validator(&schema).is_valid(&json!({ "vms": [] })));
}
