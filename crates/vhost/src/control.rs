//! The conversation with a hypervisor: what memory it shares, where its queues are, when they run.
//!
//! One thread per client handles one message at a time; the data path never waits for it, but
//! it waits for the data path: a queue is stopped by letting its requests end. Whatever changes
//! under a running queue (memory, addresses, its doorbell) is changed between a stop and a
//! start. A message that makes no sense ends the connection.

use crate::backing::{is_eventfd, let_go};
use crate::config;
use crate::error::VhostError;
use crate::inflight::{self, Area};
use crate::memory::{GuestMemory, REGIONS_MAX, Region};
use crate::queue::{DiskQueue, Line, Link, Parts};
use crate::ring::{QUEUE_SIZE_MAX, RingAddresses, SplitRing};
use hearth_reactor::{QueueId, Reactors};
use hearth_volume::{Visitor, Volume};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

/// Longest read of the configuration space; longer than any version of it.
const CONFIG_READ_MAX: u32 = 256;
/// Start of the region's base as the client counts it, for memory nobody named (see the crate).
type Base = vhost::VhostUserMemoryRegionBase;

impl From<VhostError> for Error {
    fn from(e: VhostError) -> Error {
        Error::ReqHandlerError(std::io::Error::other(e))
    }
}

/// One queue, running or not.
#[derive(Default)]
struct Vring {
    size: u32,
    at: Option<RingAddresses>,
    kick: Option<Arc<OwnedFd>>,
    enabled: bool,
    line: Arc<Line>,
    running: Option<QueueId>,
}

/// One client's device.
pub struct Device {
    disk: Arc<dyn Volume>,
    visitor: Arc<dyn Visitor>,
    link: Arc<Link>,
    reactors: Arc<Reactors>,
    features: u64,
    protocol: u64,
    memory: Arc<GuestMemory>,
    area: Option<Area>,
    vrings: Vec<Vring>,
}

impl Device {
    /// A device for a client that has just connected.
    pub fn new(
        disk: Arc<dyn Volume>,
        visitor: Arc<dyn Visitor>,
        link: Arc<Link>,
        reactors: Arc<Reactors>,
    ) -> Device {
        Device {
            disk,
            visitor,
            link,
            reactors,
            features: 0,
            protocol: 0,
            memory: Arc::default(),
            area: None,
            vrings: (0..config::QUEUES_MAX).map(|_| Vring::default()).collect(),
        }
    }

    /// Protocol features the client agreed to.
    pub fn protocol(&self) -> u64 {
        self.protocol
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        self.vrings
            .get_mut(index as usize)
            .ok_or_else(|| VhostError::QueueIndex(index).into())
    }

    /// Starts or stops a queue, as its state wants it.
    fn settle(&mut self, index: u32) -> Result<()> {
        let always = self.features & config::PROTOCOL_FEATURES == 0;
        let vring = self.vring(index)?;
        let wanted = (vring.enabled || always) && vring.size > 0;
        match (&vring.running, vring.at, vring.kick.clone()) {
            (None, Some(at), Some(kick)) if wanted => self.start(index, at, kick)?,
            (Some(_), at, kick) if !wanted || at.is_none() || kick.is_none() => self.stop(index),
            _ => {}
        }
        Ok(())
    }

    fn start(&mut self, index: u32, at: RingAddresses, kick: Arc<OwnedFd>) -> Result<()> {
        let features = self.features;
        let vring = &self.vrings[index as usize];
        let size = u16::try_from(vring.size).map_err(|_| VhostError::QueueSize(vring.size))?;
        let ring = SplitRing::new(
            &self.memory,
            at,
            size,
            features & config::EVENT_IDX != 0,
            vring.line.next_avail(),
        )?;
        let inflight = match &self.area {
            Some(area) => Some(
                area.queue(index as u16, size)
                    .ok_or(VhostError::Inflight("it has no room for a queue"))?,
            ),
            None => None,
        };
        let queue = DiskQueue::new(Parts {
            disk: self.disk.clone(),
            visitor: self.visitor.clone(),
            link: self.link.clone(),
            line: vring.line.clone(),
            memory: self.memory.clone(),
            ring,
            inflight,
            kick,
            features,
        })?;
        // Neighbouring queues on different threads, and disks spread as well.
        let turn = usize::from(self.disk.disk()) + index as usize;
        let id = self
            .reactors
            .add_queue(turn, Box::new(queue))
            .map_err(|e| Error::ReqHandlerError(std::io::Error::other(e)))?;
        tracing::debug!(
            disk = self.disk.name(),
            queue = index,
            size,
            "queue started"
        );
        self.vrings[index as usize].running = Some(id);
        Ok(())
    }

    /// Returns when the queue's requests have ended.
    fn stop(&mut self, index: u32) {
        let running = self
            .vrings
            .get_mut(index as usize)
            .and_then(|v| v.running.take());
        if let Some(id) = running {
            self.reactors.remove_queue(id);
            tracing::debug!(disk = self.disk.name(), queue = index, "queue stopped");
        }
    }

    /// Stops all queues.
    pub fn stop_all(&mut self) {
        (0..u32::from(config::QUEUES_MAX)).for_each(|i| self.stop(i));
    }

    /// Changes something under all queues.
    fn with_all_stopped<T>(&mut self, change: impl FnOnce(&mut Device) -> Result<T>) -> Result<T> {
        self.stop_all();
        let out = change(self)?;
        for index in 0..u32::from(config::QUEUES_MAX) {
            self.settle(index)?;
        }
        Ok(out)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop_all();
    }
}

/// A descriptor that must be an eventfd.
fn eventfd(file: File, what: &'static str) -> Result<OwnedFd> {
    if !is_eventfd(&file) {
        let_go(vec![file.into()]);
        return Err(VhostError::NotEventfd(what).into());
    }
    Ok(file.into())
}

fn map(region: &VhostUserMemoryRegion, file: &File) -> Result<Region> {
    Ok(Region::new(
        region.guest_phys_addr,
        region.user_addr,
        region.memory_size,
        file,
        region.mmap_offset,
    )?)
}

const UNASKED: Error = Error::InvalidOperation("not offered by this back end");

impl VhostUserBackendReqHandlerMut for Device {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        for vring in &mut self.vrings {
            vring.enabled = false;
        }
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(config::features(&*self.disk))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        // Refusing what a guest agreed on before would keep it from its disk until it is booted.
        if features & !(config::features(&*self.disk) | config::TOLERATED) != 0 {
            return Err(Error::FeatureMismatch);
        }
        if features == self.features {
            return Ok(());
        }
        self.with_all_stopped(|device| {
            device.features = features;
            Ok(())
        })
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<Base>>> {
        let mapped = regions.iter().zip(&files);
        let mapped = mapped.map(|(r, f)| map(r, f)).collect::<Result<Vec<_>>>();
        // Mapped is mapped; what is behind a file that was refused may not let it be closed.
        let_go(files.into_iter().map(OwnedFd::from).collect());
        let memory = Arc::new(GuestMemory::new(mapped?)?);
        self.with_all_stopped(|device| {
            device.memory = memory;
            Ok(None)
        })
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        if num == 0 || num > u32::from(QUEUE_SIZE_MAX) || !num.is_power_of_two() {
            return Err(VhostError::QueueSize(num).into());
        }
        self.stop(index);
        self.vring(index)?.size = num;
        self.settle(index)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let at = RingAddresses {
            desc: descriptor,
            avail: available,
            used,
        };
        if self.vring(index)?.at == Some(at) {
            return Ok(());
        }
        self.stop(index);
        self.vring(index)?.at = Some(at);
        self.settle(index)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.stop(index);
        self.vring(index)?.line.set_next_avail(base);
        self.settle(index)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.stop(index);
        let vring = self.vring(index)?;
        // Asking for the base stops the ring until it is given a new doorbell.
        vring.kick = None;
        let base = vring.line.next_avail().into();
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = fd.ok_or(UNASKED)?;
        let kick = eventfd(fd, "kick")?;
        self.stop(index.into());
        self.vring(index.into())?.kick = Some(Arc::new(kick));
        self.settle(index.into())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let call = fd.map(|fd| eventfd(fd, "call")).transpose()?;
        let call = self.vring(index.into())?.line.set_call(call);
        if let Some(call) = call {
            let turn = usize::from(self.disk.disk()) + usize::from(index);
            self.reactors.ring(turn, call);
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        // Errors end the connection, which says more.
        fd.map(|fd| eventfd(fd, "error")).transpose()?;
        self.vring(index.into()).map(drop)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.protocol = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(config::QUEUES_MAX.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.vring(index)?.enabled = enable;
        self.settle(index)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let end = offset
            .checked_add(size)
            .filter(|end| *end <= CONFIG_READ_MAX)
            .ok_or(Error::InvalidParam)?;
        // Fields of later versions of the specification read as zeros: not there.
        let mut space = config::space(&*self.disk, self.features).to_vec();
        space.resize(CONFIG_READ_MAX as usize, 0);
        Ok(space[offset as usize..end as usize].to_vec())
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // The switch of the write cache moves nothing: whoever agreed on having it has no cache.
        let at = config::WRITEBACK_AT.checked_sub(offset);
        let known = at.is_some_and(|at| (at as usize) < buf.len());
        known.then_some(()).ok_or(Error::InvalidParam)
    }

    fn set_gpu_socket(&mut self, _backend: GpuBackend) -> Result<()> {
        Err(UNASKED)
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(UNASKED)
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (wanted.num_queues, wanted.queue_size);
        if queues > config::QUEUES_MAX || size > QUEUE_SIZE_MAX {
            return Err(Error::InvalidParam);
        }
        let (file, len) = inflight::create(queues, size)?;
        Ok((VhostUserInflight::new(len, 0, queues, size), file))
    }

    fn set_inflight_fd(&mut self, given: &VhostUserInflight, file: File) -> Result<()> {
        let area = Area::map(
            &file,
            given.mmap_offset,
            given.mmap_size,
            given.num_queues,
            given.queue_size,
        );
        let_go(vec![file.into()]);
        let area = area?;
        self.with_all_stopped(|device| {
            device.area = Some(area);
            Ok(())
        })
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<Base>> {
        let region = map(region, &fd);
        let_go(vec![fd.into()]);
        let region = region?;
        self.with_all_stopped(|device| {
            let mut regions = device.memory.regions().to_vec();
            regions.push(region);
            device.memory = Arc::new(GuestMemory::new(regions)?);
            Ok(None)
        })
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.with_all_stopped(|device| {
            let mut regions = device.memory.regions().to_vec();
            let found = regions
                .iter()
                .position(|r| r.guest() == region.guest_phys_addr && r.len() == region.memory_size)
                .ok_or(Error::InvalidParam)?;
            regions.remove(found);
            device.memory = Arc::new(GuestMemory::new(regions)?);
            Ok(())
        })
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(UNASKED)
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(UNASKED)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(UNASKED)
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(UNASKED)
    }
}
