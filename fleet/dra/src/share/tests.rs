use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::*;
use crate::device::tests::card;
use crate::parameters::{Class, Memory, OnFull, ShareParameters, Time};

fn offer(kind: &str) -> Offer {
    Offer::all(&[card("card0", kind)], &[], &[]).remove(0)
}

fn result(memory: &str, time: &str) -> DeviceRequestAllocationResult {
    let pair = |name: &str, text: &str| (name.to_owned(), Quantity(text.to_owned()));
    DeviceRequestAllocationResult {
        consumed_capacity: Some(BTreeMap::from([pair(MEMORY, memory), pair(TIME, time)])),
        device: "card0".to_owned(),
        driver: crate::DRIVER.to_owned(),
        pool: "node".to_owned(),
        request: "gpu".to_owned(),
        ..DeviceRequestAllocationResult::default()
    }
}

fn with(memory: Memory, time: Time) -> Applied {
    Applied { parameters: ShareParameters { memory, time, ..ShareParameters::default() }, ..Applied::default() }
}

fn made(kind: &str, result: &DeviceRequestAllocationResult, applied: &Applied) -> Result<Value, String> {
    let pods = vec!["web-0".to_owned(), "web-1".to_owned()];
    let claim = Claim { namespace: "prod", name: "web-gpu", uid: "1234-abcd", pods };
    let body = body(&claim, 0, &[(result, &offer(kind))], applied, Path::new("/run/s"))?;
    Ok(match body {
        Body::Tenant(spec) => serde_json::to_value(spec).unwrap(),
        Body::Vm(spec) => serde_json::to_value(spec).unwrap(),
    })
}

#[test]
fn allocated_share_is_guaranteed() {
    for (kind, socket) in [("cuda", "/run/s/k8s-1234-abcd-0/cuda.sock"), ("simgpu", "/run/s/k8s-1234-abcd-0/vgpu.sock")]
    {
        let body = made(kind, &result("256Mi", "750"), &Applied::default()).unwrap();
        assert_eq!(body["name"], "k8s-1234-abcd-0");
        assert_eq!((&body["vram_mib"], &body["memory"]["guarantee_mib"]), (&json!(256), &json!(256)));
        assert_eq!((&body["time"]["weight"], &body["time"]["guarantee_permille"]), (&json!(750), &json!(750)));
        assert_eq!(body["socket"], socket);
        let labels = json!({ "namespace": "prod", "claim": "web-gpu", "claim_uid": "1234-abcd", "request": "gpu", "pod": "web-0,web-1" });
        assert_eq!(body["labels"], labels);
    }
}

#[test]
fn without_parts_it_is_the_whole_card() {
    let whole = DeviceRequestAllocationResult { consumed_capacity: None, ..result("1Mi", "1") };
    let body = made("simgpu", &whole, &Applied::default()).unwrap();
    assert_eq!((&body["vram_mib"], &body["time"]["guarantee_permille"]), (&json!(960), &json!(1000)));
}

#[test]
fn parameters_can_lower_guarantee_and_raise_limit() {
    let memory = Memory {
        guarantee: Some("128Mi".to_owned()),
        limit: Some("512Mi".to_owned()),
        swap_cap: Some("64Mi".to_owned()),
        weight: Some(200),
        on_full: Some(OnFull::Queue),
    };
    let time = Time { weight: Some(300), cap_permille: Some(500), class: Some(Class::Background) };
    let body = made("simgpu", &result("256Mi", "750"), &with(memory, time)).unwrap();
    assert_eq!(body["vram_mib"], 512);
    assert_eq!(body["memory"]["guarantee_mib"], 128);
    assert_eq!((&body["memory"]["swap_cap_mib"], &body["memory"]["weight"]), (&json!(64), &json!(200)));
    assert_eq!(body["memory"]["on_full"], "queue");
    assert_eq!((&body["time"]["weight"], &body["time"]["guarantee_permille"]), (&json!(300), &json!(500)));
    assert_eq!((&body["time"]["cap_permille"], &body["time"]["class"]), (&json!(500), &json!("background")));
}

#[test]
fn out_of_range_share_is_rejected_with_bound() {
    let limit = |text: &str| with(Memory { limit: Some(text.to_owned()), ..Memory::default() }, Time::default());
    let guarantee =
        |text: &str| with(Memory { guarantee: Some(text.to_owned()), ..Memory::default() }, Time::default());
    let weight = |weight| with(Memory::default(), Time { weight: Some(weight), ..Time::default() });
    let cap = |cap| with(Memory::default(), Time { cap_permille: Some(cap), ..Time::default() });
    let mine = |mut applied: Applied| {
        (applied.time_weight_of_claim, applied.memory_weight_of_claim) = (true, true);
        applied
    };
    let good = result("256Mi", "250");
    for (applied, expected) in [
        (limit("2Gi"), "memory.limit: 2048Mi, expected at most the 960Mi of card `card0`"),
        (limit("0"), "memory.limit: 0Mi"),
        (limit("129Mi"), "memory.limit: `129Mi`, expected a multiple of 2Mi"),
        (limit("much"), "memory.limit: `much` is not a quantity"),
        (guarantee("512Mi"), "memory.guarantee: 512Mi, expected at most 256Mi: the allocated memory"),
        (weight(0), "time.weight: 0, expected 1 to 10000"),
        (mine(weight(251)), "time.weight: 251, expected 1 to 250: the allocated time in thousandths"),
        (
            mine(with(Memory { weight: Some(9999), ..Memory::default() }, Time::default())),
            "memory.weight: 9999, expected 1 to 250",
        ),
        (cap(0), "time.capPermille: 0, expected 1 to 1000"),
        (cap(1001), "time.capPermille: 1001"),
    ] {
        let error = made("simgpu", &good, &applied).unwrap_err();
        assert!(error.starts_with("request `gpu`, device `card0`: ") && error.contains(expected), "{error}");
    }
    for (bad, expected) in [
        (result("2Gi", "250"), "allocated memory: 2048 MiB, expected 1 to 960"),
        (result("0", "250"), "allocated memory: 0 MiB"),
        (result("256Mi", "1001"), "allocated time: 1001, expected 1 to 1000"),
        (result("256Mi", "0"), "allocated time: 0"),
        (result("x", "1"), "allocated memory: `x` is not a quantity"),
        (
            DeviceRequestAllocationResult { admin_access: Some(true), ..good.clone() },
            "adminAccess does not allocate a share",
        ),
    ] {
        let error = made("simgpu", &bad, &Applied::default()).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    assert!(made("simgpu", &good, &weight(9000)).is_ok(), "a class may");
}

#[test]
fn groups_are_those_of_one_namespace() {
    let mut applied = Applied::default();
    applied.parameters.segment_group = Some("team".to_owned());
    let body = made("simgpu", &result("256Mi", "250"), &applied).unwrap();
    assert_eq!(body["paravirtual"]["group"], "prod.team");
    assert!(
        made("cuda", &result("256Mi", "250"), &applied)
            .unwrap_err()
            .contains("segmentGroup, expected no such parameter")
    );
}

#[test]
fn share_groups_are_of_one_namespace_and_of_cuda_cards() {
    let mut applied = Applied::default();
    applied.parameters.sharing = Some(crate::parameters::Mode::Together);
    let alone = made("cuda", &result("256Mi", "250"), &applied).unwrap_err();
    assert!(alone.contains("sharing, expected it together with shareGroup"), "{alone}");
    applied.parameters.share_group = Some("team".to_owned());
    let body = made("cuda", &result("256Mi", "250"), &applied).unwrap();
    assert_eq!((&body["share_group"], &body["sharing"]), (&"prod.team".into(), &"together".into()));
    let error = made("simgpu", &result("256Mi", "250"), &applied).unwrap_err();
    assert!(error.contains("shareGroup, expected no such parameter"), "{error}");
}

#[test]
fn cards_of_a_request_become_one_tenant() {
    let cards = [card("a", "cuda"), card("b", "cuda"), card("vm", "simgpu")];
    let offers = Offer::all(&cards, &[], &[]);
    let of = |device: &str, request: &str, memory: &str| DeviceRequestAllocationResult {
        device: device.to_owned(),
        request: request.to_owned(),
        ..result(memory, "250")
    };
    let results = [
        of("a", "gpu", "256Mi"),
        of("vm", "gpu", "128Mi"),
        of("b", "gpu", "256Mi"),
        of("a", "other", "128Mi"),
        of("vm", "gpu", "128Mi"),
    ];
    let given = |results: &'static [DeviceRequestAllocationResult], offers: &'static [Offer]| {
        let offer = |name: &str| offers.iter().find(|offer| offer.device == name).unwrap();
        results.iter().map(|result| (result, offer(&result.device))).collect::<Vec<_>>()
    };
    let (results, offers): (&'static _, &'static _) =
        (Box::leak(Box::new(results)), Box::leak(offers.into_boxed_slice()));
    let groups = grouped(given(results, offers)).unwrap();
    let devices = |group: &Vec<Given<'_>>| group.iter().map(|(result, _)| result.device.clone()).collect::<Vec<_>>();
    assert_eq!(groups.iter().map(devices).collect::<Vec<_>>(), [vec!["a", "b"], vec!["vm"], vec!["a"], vec!["vm"]]);

    let claim = Claim { namespace: "prod", name: "train", uid: "1", pods: Vec::new() };
    let made = |group: &[Given<'_>], applied: &Applied| body(&claim, 3, group, applied, Path::new("/run/s"));
    let weight = with(Memory::default(), Time { weight: Some(40), ..Time::default() });
    let Body::Tenant(spec) = made(&groups[0], &weight).unwrap() else { panic!("no tenant") };
    assert_eq!((spec.card_names(), spec.vram_mib, spec.time.weight), (vec!["a", "b"], 256, 40));
    let sockets = ["/run/s/k8s-1-3/a.sock", "/run/s/k8s-1-3/b.sock"].map(PathBuf::from);
    assert_eq!(spec.socket_paths(Path::new("/run")), sockets);

    let unequal = [of("a", "gpu", "256Mi"), of("b", "gpu", "128Mi")];
    let unequal = grouped(given(Box::leak(Box::new(unequal)), offers)).unwrap();
    let error = made(&unequal[0], &Applied::default()).unwrap_err();
    assert!(error.contains("the parts of the devices `a` and `b` differ"), "{error}");
    let mut shared = Applied::default();
    shared.parameters.share_group = Some("g".to_owned());
    assert!(
        made(&groups[0], &shared).unwrap_err().contains("expected no such parameter for a request of several cards")
    );
    let twice = [of("a", "gpu", "128Mi"), of("a", "gpu", "128Mi")];
    let error = grouped(given(Box::leak(Box::new(twice)), offers)).unwrap_err();
    assert!(error.contains("`distinctAttribute: gpu-mediator.internal/card`"), "{error}");
}
