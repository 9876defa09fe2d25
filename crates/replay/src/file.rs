//! A file or block device as the target, over io_uring.

use std::sync::Arc;

use hearth_io::file::OpenMode;
use hearth_io::spec::OpenSpecError;
use hearth_io::{Class, IoDone, IoOp, OpKind, OriginSpec, Proactor, Targets, Wait, proactor};

use crate::error::ReplayError;
use crate::target::{Done, Job, Kind, LEN_MAX, Target};

/// The only target of the driver's table.
const PLACE: hearth_io::Target = hearth_io::Target::Origin(0);

/// See the module.
pub struct FileTarget {
    name: String,
    size: u64,
    align: u64,
    read_only: bool,
    proactor: Box<dyn Proactor>,
    dones: Vec<IoDone>,
}

impl FileTarget {
    /// Opens a path, or whatever else an origin may be written as (`model-hdd:PATH`). Locks it.
    ///
    /// # Errors
    ///
    /// When it cannot be opened, or is used by somebody else.
    pub fn open(spec: &str, read_only: bool) -> Result<FileTarget, ReplayError> {
        let parsed: OriginSpec = spec
            .parse()
            .map_err(|_| ReplayError::Address(spec.to_owned()))?;
        let mode = OpenMode {
            read_only,
            unlocked: false,
        };
        let device = parsed.open(mode).map_err(|e| match e {
            OpenSpecError::NotFile(_) => ReplayError::Address(spec.to_owned()),
            e => ReplayError::Open(e.fault()),
        })?;
        let (size, align) = (device.size(), u64::from(device.align()));
        let targets = Targets::new();
        targets.set(PLACE, Some(Arc::new(device)));
        let proactor = proactor::open(targets, None).map_err(|e| ReplayError::Open(e.fault()))?;
        Ok(FileTarget {
            name: spec.to_owned(),
            size: size / align * align,
            align,
            read_only,
            proactor,
            dones: Vec::new(),
        })
    }
}

impl Target for FileTarget {
    fn name(&self) -> &str {
        &self.name
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn align(&self) -> u64 {
        self.align
    }

    fn len_max(&self) -> u64 {
        LEN_MAX
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn can(&self, _kind: Kind) -> bool {
        true
    }

    fn submit(&mut self, job: Job) -> Result<(), ReplayError> {
        self.proactor.submit_io(IoOp {
            id: job.id,
            target: PLACE,
            kind: match job.kind {
                Kind::Read => OpKind::Read,
                Kind::Write => OpKind::Write,
                Kind::Discard => OpKind::Discard,
                Kind::Flush => OpKind::Flush,
            },
            offset: job.offset,
            len: job.len,
            bufs: job.buf.into_iter().collect(),
            crcs: Default::default(),
            sums: false,
            class: Class::Foreground,
        });
        Ok(())
    }

    fn wait(&mut self, until_ns: u64, done: &mut Vec<Done>) -> Result<(), ReplayError> {
        let mut events = Vec::new();
        let at_ns = self
            .proactor
            .wait(Wait::Until(until_ns), &mut events, &mut self.dones)
            .map_err(|e| ReplayError::Broken {
                name: self.name.clone(),
                why: e.to_string(),
            })?;
        done.extend(self.dones.drain(..).map(|d| Done {
            id: d.op.id,
            buf: d.op.bufs.into_iter().next(),
            result: d.result.map_err(|e| e.to_string()),
            at_ns,
        }));
        Ok(())
    }
}
