//! A KubeVirt hook that adds vGPUs to virtual machines.
//!
//! KubeVirt starts the hook as a sidecar of virt-launcher, connects to the hook's socket, and calls the hook before
//! defining a domain (kubevirt/kubevirt, pkg/hooks). The container that runs QEMU gets the vGPU through a claim. In
//! this container, the vGPU's socket is in a folder named after the request (`cdi-spec`). The hook therefore needs only
//! the names of the requests.
//!
//! The hook does not create vGPUs, and does not check that a vGPU exists.

use api::launch::{self, SocketVmm};
use cdi_spec::Vgpu;
use fleet_grpc::hooks::info::info_server::Info;
use fleet_grpc::hooks::info::{HookPoint, InfoParams, InfoResult};
use fleet_grpc::hooks::v1alpha2::{
    self, OnDefineDomainParams, OnDefineDomainResult, PreCloudInitIsoParams, PreCloudInitIsoResult,
};
use fleet_grpc::hooks::v1alpha3::{self, ShutdownParams, ShutdownResult};
use tonic::{Request, Response, Status, async_trait};

pub mod domain;

/// Annotation of a virtual machine with the comma-separated names of its requests.
pub const ANNOTATION: &str = "gpu-mediator.internal/requests";
/// Maximum number of vGPUs in a virtual machine.
const MAX_VGPUS: usize = 16;
/// Name of a vGPU's socket in its folder.
const SOCKET: &str = "vgpu.sock";

/// The hook, which serves virt-launcher's calls.
#[derive(Clone, Debug)]
pub struct Hook {
    /// Name of the hook. The name of its socket is this name with the suffix `.sock`.
    pub name: String,
    /// Requests that apply to virtual machines without the annotation.
    pub requests: Vec<String>,
}

/// Returns QEMU's argument for the vGPU of a request. `number` is the index of the vGPU in its virtual machine.
fn device(request: &str, number: usize) -> Result<String, String> {
    let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if request.is_empty() || request.len() > 63 || !request.bytes().all(good) {
        return Err(format!("{request:?} is not a request name, expected up to 63 of the characters a-z 0-9 -"));
    }
    let socket = Vgpu::folder(request).join(SOCKET);
    let vm = launch::Named { name: request, socket: &socket, profile: None, is_cuda: false };
    let args = launch::args(SocketVmm::Qemu, vm, &launch::MemorySize::default()).args;
    let value = args.iter().skip_while(|arg| *arg != "-device").nth(1).ok_or("the QEMU command has no device")?;
    let mut device: serde_json::Value = serde_json::from_str(value).map_err(|error| error.to_string())?;
    device["id"] = format!("vgpu{number}").into();
    Ok(device.to_string())
}

impl Hook {
    /// Returns the requests of a virtual machine. `vmi` describes the virtual machine in JSON.
    fn requests(&self, vmi: &[u8]) -> Result<Vec<String>, String> {
        let vmi: serde_json::Value =
            serde_json::from_slice(vmi).map_err(|error| format!("the virtual machine is not JSON: {error}"))?;
        let said = &vmi["metadata"]["annotations"][ANNOTATION];
        let requests: Vec<String> = match said.as_str() {
            Some(said) => said.split(',').map(|name| name.trim().to_owned()).collect(),
            None => self.requests.clone(),
        };
        if requests.len() > MAX_VGPUS {
            return Err(format!("{} vGPUs, expected at most {MAX_VGPUS}", requests.len()));
        }
        Ok(requests)
    }

    /// Returns the domain with the vGPUs of its virtual machine.
    fn define(&self, params: &OnDefineDomainParams) -> Result<OnDefineDomainResult, Status> {
        let wrong = |what: String| Status::invalid_argument(format!("gpu-mediator's hook: {what}"));
        let requests = self.requests(&params.vmi).map_err(wrong)?;
        let devices = requests.iter().enumerate().map(|(number, request)| device(request, number));
        let devices = devices.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
        let xml = domain::with_devices(&params.domain_xml, &devices).map_err(|error| wrong(error.to_string()))?;
        Ok(OnDefineDomainResult { domain_xml: xml })
    }
}

/// Returns the response of a hook that changes nothing.
fn unchanged(params: PreCloudInitIsoParams) -> PreCloudInitIsoResult {
    let PreCloudInitIsoParams { cloud_init_no_cloud_source, cloud_init_data, .. } = params;
    PreCloudInitIsoResult { cloud_init_no_cloud_source, cloud_init_data }
}

#[async_trait]
impl Info for Hook {
    async fn info(&self, _: Request<InfoParams>) -> Result<Response<InfoResult>, Status> {
        Ok(Response::new(InfoResult {
            name: self.name.clone(),
            hook_points: vec![HookPoint { name: "OnDefineDomain".to_owned(), priority: 0 }],
            versions: vec!["v1alpha2".to_owned(), "v1alpha3".to_owned()],
        }))
    }
}

#[async_trait]
impl v1alpha2::callbacks_server::Callbacks for Hook {
    async fn on_define_domain(
        &self,
        request: Request<OnDefineDomainParams>,
    ) -> Result<Response<OnDefineDomainResult>, Status> {
        self.define(request.get_ref()).map(Response::new)
    }

    async fn pre_cloud_init_iso(
        &self,
        request: Request<PreCloudInitIsoParams>,
    ) -> Result<Response<PreCloudInitIsoResult>, Status> {
        Ok(Response::new(unchanged(request.into_inner())))
    }
}

#[async_trait]
impl v1alpha3::callbacks_server::Callbacks for Hook {
    async fn on_define_domain(
        &self,
        request: Request<OnDefineDomainParams>,
    ) -> Result<Response<OnDefineDomainResult>, Status> {
        self.define(request.get_ref()).map(Response::new)
    }

    async fn pre_cloud_init_iso(
        &self,
        request: Request<PreCloudInitIsoParams>,
    ) -> Result<Response<PreCloudInitIsoResult>, Status> {
        Ok(Response::new(unchanged(request.into_inner())))
    }

    async fn shutdown(&self, _: Request<ShutdownParams>) -> Result<Response<ShutdownResult>, Status> {
        Ok(Response::new(ShutdownResult {}))
    }
}
