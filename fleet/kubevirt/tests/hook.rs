//! Tests the hook process with the calls that virt-launcher makes.

use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use fleet_grpc::hooks::info::InfoParams;
use fleet_grpc::hooks::info::info_client::InfoClient;
use fleet_grpc::hooks::v1alpha2::{self, OnDefineDomainParams, PreCloudInitIsoParams};
use fleet_grpc::hooks::v1alpha3::{self, ShutdownParams};
use tonic::transport::{Channel, Endpoint};

const DOMAIN: &str = include_str!("../src/domain/kubevirt.xml");

/// The hook process, killed on drop.
struct Hook(Child, tempfile::TempDir);

impl Hook {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-mediator-kubevirt"));
        let child = command.arg("--folder").arg(folder.path()).args(["--request", "gpu0"]).spawn().unwrap();
        Self(child, folder)
    }

    fn socket(&self) -> std::path::PathBuf {
        self.1.path().join("gpu-mediator.sock")
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn connect(socket: &Path) -> Channel {
    let end = tokio::time::Instant::now() + Duration::from_secs(60);
    while !socket.exists() {
        assert!(tokio::time::Instant::now() < end, "no socket");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Endpoint::from_shared(format!("unix:{}", socket.display())).unwrap().connect().await.unwrap()
}

#[tokio::test(flavor = "current_thread")]
async fn domain_gets_vgpus_from_annotation_or_arguments() {
    let hook = Hook::start();
    let channel = connect(&hook.socket()).await;
    let info = InfoClient::new(channel.clone()).info(InfoParams {}).await.unwrap().into_inner();
    assert_eq!((info.name.as_str(), info.hook_points[0].name.as_str()), ("gpu-mediator", "OnDefineDomain"));
    assert_eq!(info.versions, ["v1alpha2", "v1alpha3"]);

    let mut old = v1alpha2::callbacks_client::CallbacksClient::new(channel.clone());
    let mut new = v1alpha3::callbacks_client::CallbacksClient::new(channel);
    let params = |vmi: &str| OnDefineDomainParams { domain_xml: DOMAIN.into(), vmi: vmi.into() };
    let plain = old.on_define_domain(params(r#"{"metadata":{"name":"a"}}"#)).await.unwrap().into_inner();
    let xml = String::from_utf8(plain.domain_xml).unwrap();
    assert!(xml.contains("/run/gpu-mediator/vgpu/gpu0/vgpu.sock") && xml.contains("memfd"), "{xml}");
    let vmi = r#"{"metadata":{"annotations":{"gpu-mediator.internal/requests":"left, right"}}}"#;
    let both = new.on_define_domain(params(vmi)).await.unwrap().into_inner();
    let xml = String::from_utf8(both.domain_xml).unwrap();
    for (request, id) in [("left", "vgpu0"), ("right", "vgpu1")] {
        assert!(xml.contains(&format!("/run/gpu-mediator/vgpu/{request}/vgpu.sock")) && xml.contains(id), "{xml}");
    }
    assert!(!xml.contains("gpu0/"));

    for (vmi, word) in [
        ("no json", "not JSON"),
        (r#"{"metadata":{"annotations":{"gpu-mediator.internal/requests":"../../etc"}}}"#, "not a request name"),
        (r#"{"metadata":{"annotations":{"gpu-mediator.internal/requests":",,,,,,,,,,,,,,,,"}}}"#, "at most 16"),
    ] {
        let error = new.on_define_domain(params(vmi)).await.unwrap_err();
        assert!(error.code() == tonic::Code::InvalidArgument && error.message().contains(word), "{error}");
    }
    let broken = OnDefineDomainParams { domain_xml: b"<domain><a></domain>".into(), vmi: b"{}".into() };
    assert!(old.on_define_domain(broken).await.unwrap_err().message().contains("not XML"));

    let init = PreCloudInitIsoParams {
        cloud_init_no_cloud_source: b"a".into(),
        vmi: b"{}".into(),
        cloud_init_data: b"b".into(),
    };
    let same = new.pre_cloud_init_iso(init).await.unwrap().into_inner();
    assert_eq!((same.cloud_init_no_cloud_source, same.cloud_init_data), (b"a".to_vec(), b"b".to_vec()));
    new.shutdown(ShutdownParams {}).await.unwrap();
}
