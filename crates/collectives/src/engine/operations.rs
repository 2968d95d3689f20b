//! The operations themselves: from what was agreed to bytes on the mesh and outputs of jobs.

use super::{Entry, Failure, Outcome, Shared, lock};
use crate::adasum::adasum;
use crate::algorithms::Members;
use crate::light::Key;
use crate::mesh::Lost;
use crate::number;
use evener_negotiate::{Answer, Kind, Meta};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Tensors that are reduced as one: (answer, tensor) of each. `key`: of a gradient that is sent in part.
struct Part {
    dtype: u8,
    key: Option<Key>,
    list: Vec<(usize, usize)>,
}

impl Part {
    fn new(dtype: u8, key: Option<Key>, first: (usize, usize)) -> Self {
        let list = vec![first];
        Self { dtype, key, list }
    }
}

impl Shared {
    /// Runs what was agreed. Entries of refused answers get the error.
    pub(super) fn launch(&self, answers: &[Arc<Answer>]) -> Result<(), Lost> {
        let mut todo: Vec<(&Answer, Option<Entry>)> = Vec::with_capacity(answers.len());
        for answer in answers {
            let entry = self.take(answer);
            if !answer.error.is_empty() {
                if let Some(entry) = entry {
                    entry
                        .job
                        .finish(Err(Failure::Mismatch(answer.error.clone())));
                }
            } else if entry.is_some() || self.includes(answer.request.set) {
                todo.push((answer, entry));
            }
        }
        let Some((first, _)) = todo.first() else {
            return Ok(());
        };
        if first.request.kind == Kind::Allreduce {
            return self.all_reduce(todo);
        }
        for (answer, entry) in todo {
            self.run(answer, entry)?;
        }
        Ok(())
    }

    fn includes(&self, set: u32) -> bool {
        lock(&self.sets)
            .get(&set)
            .is_some_and(|ranks| ranks.contains(&self.rank))
    }

    /// With the members of an answer's process set.
    fn with<T>(&self, set: u32, run: impl FnOnce(&Members) -> Result<T, Lost>) -> Result<T, Lost> {
        let ranks = lock(&self.sets).get(&set).cloned().unwrap_or_default();
        let Some(place) = ranks.iter().position(|rank| *rank == self.rank) else {
            return Err(Lost::Meeting(format!(
                "this rank is not in process set {set}"
            )));
        };
        let mesh = self.mesh();
        run(&Members {
            mesh: &mesh,
            ranks: &ranks,
            place,
        })
    }

    fn all_reduce(&self, todo: Vec<(&Answer, Option<Entry>)>) -> Result<(), Lost> {
        let (answers, mut entries): (Vec<&Answer>, Vec<Option<Entry>>) = todo.into_iter().unzip();
        let first = &answers[0].request;
        let (op, factors, set) = (first.op, first.factors, first.set);
        let size = lock(&self.sets).get(&set).map_or(1, Vec::len);
        let light = self.light.get().filter(|_| set == 0);
        // (answer, tensor) of each type, in the agreed order. What is sent in part goes alone.
        let mut types: Vec<Part> = Vec::new();
        for (index, answer) in answers.iter().enumerate() {
            let mark = answer.request.root;
            for (tensor, meta) in answer.request.tensors.iter().enumerate() {
                if light.is_some_and(|it| it.takes_part(mark, meta.dtype, op, &meta.shape)) {
                    types.push(Part::new(meta.dtype, Some((mark, tensor)), (index, tensor)));
                    continue;
                }
                let alike = |part: &&mut Part| part.dtype == meta.dtype && part.key.is_none();
                match types.iter_mut().find(alike) {
                    Some(part) => part.list.push((index, tensor)),
                    None => types.push(Part::new(meta.dtype, None, (index, tensor))),
                }
            }
        }
        let mut failed: HashMap<usize, String> = HashMap::new();
        for Part { dtype, key, list } in types {
            let shape = |(index, tensor): (usize, usize)| {
                let meta: &Meta = &answers[index].request.tensors[tensor];
                (
                    &meta.shape[..],
                    meta.elements() as usize * number::size(dtype),
                )
            };
            let reduce = |data: &mut [u8]| {
                number::scale(dtype, data, factors.0);
                match (light, key) {
                    (Some(light), Some(key)) => light.sparse(&self.mesh(), data, key)?,
                    (Some(light), None) => light.all_reduce(&self.mesh(), data, dtype, op)?,
                    _ => self.with(set, |members| members.all_reduce(data, dtype, op))?,
                }
                number::finish(dtype, op, data, factors.1, size);
                Ok(())
            };
            if let &[at] = &list[..]
                && let Some(entry) = &mut entries[at.0]
                && let Ok(data) = entry.job.begin(at.1, shape(at).0, 0)
            {
                reduce(data)?; // in place, and nothing is copied twice
                continue;
            }
            let mut work = Vec::with_capacity(list.iter().map(|at| shape(*at).1).sum());
            for at in &list {
                match &entries[at.0] {
                    Some(entry) => work.extend_from_slice(entry.job.input(at.1)),
                    None => work.resize(work.len() + shape(*at).1, 0),
                }
            }
            reduce(&mut work)?;
            let mut start = 0;
            for at in list {
                let (dims, bytes) = shape(at);
                if let Some(entry) = &mut entries[at.0] {
                    match entry.job.output(at.1, dims) {
                        Ok(output) => output.copy_from_slice(&work[start..start + bytes]),
                        Err(problem) => drop(failed.insert(at.0, problem)),
                    }
                }
                start += bytes;
            }
        }
        for (index, entry) in entries.into_iter().enumerate() {
            if let Some(entry) = entry {
                let outcome = match failed.remove(&index) {
                    Some(problem) => Err(Failure::Refused(problem)),
                    None => Ok(Outcome::default()),
                };
                entry.job.finish(outcome);
            }
        }
        Ok(())
    }

    fn run(&self, answer: &Answer, entry: Option<Entry>) -> Result<(), Lost> {
        let request = &answer.request;
        let mut outcome = Outcome {
            value: answer.value,
            received: Vec::new(),
        };
        match request.kind {
            Kind::Barrier => {}
            Kind::Join => {
                self.joins.fetch_add(1, Ordering::AcqRel);
            }
            Kind::AddSet => {
                if let Ok(number) = u32::try_from(answer.value) {
                    let ranks = request.splits.iter().map(|rank| *rank as usize).collect();
                    lock(&self.sets).insert(number, ranks);
                }
            }
            Kind::RemoveSet => {
                if let Ok(number) = u32::try_from(answer.value) {
                    lock(&self.sets).remove(&number);
                }
            }
            Kind::Adasum if entry.is_none() => {
                for meta in &request.tensors {
                    let mut zeros = vec![0; meta.elements() as usize * number::size(meta.dtype)];
                    self.with(request.set, |members| {
                        adasum(members, &mut zeros, meta.dtype)
                    })?;
                }
            }
            _ => {}
        }
        let Some(mut entry) = entry else {
            return Ok(());
        };
        let mut made = Ok(());
        match request.kind {
            Kind::Adasum => {
                for (index, meta) in request.tensors.iter().enumerate() {
                    let Some(work) = begun(&mut entry, index, &meta.shape, &mut made) else {
                        return self.give_up(entry, made);
                    };
                    number::scale(meta.dtype, work, request.factors.0);
                    self.with(request.set, |members| adasum(members, work, meta.dtype))?;
                    number::scale(meta.dtype, work, request.factors.1);
                }
            }
            Kind::Broadcast => {
                for (index, meta) in request.tensors.iter().enumerate() {
                    let Some(work) = begun(&mut entry, index, &meta.shape, &mut made) else {
                        return self.give_up(entry, made);
                    };
                    self.with(request.set, |members| {
                        let root = request.root as usize;
                        let root = members.ranks.iter().position(|rank| *rank == root);
                        members.broadcast(work, root.unwrap_or(0))
                    })?;
                }
            }
            Kind::Allgather => {
                for index in 0..request.tensors.len() {
                    made = made.and(self.all_gather(answer, &mut entry, index)?);
                }
            }
            Kind::Reducescatter => {
                for index in 0..request.tensors.len() {
                    made = made.and(self.reduce_scatter(answer, &mut entry, index)?);
                }
            }
            Kind::Alltoall => {
                made = self.all_to_all(answer, &mut entry, &mut outcome)?;
            }
            _ => {}
        }
        let end = made.map(|()| outcome).map_err(Failure::Refused);
        entry.job.finish(end);
        Ok(())
    }

    /// This rank has no memory for a collective that the others have begun.
    fn give_up(&self, entry: Entry, made: Result<(), String>) -> Result<(), Lost> {
        let problem = made.err().unwrap_or_default();
        entry.job.finish(Err(Failure::Broken(problem.clone())));
        Err(Lost::Meeting(problem))
    }

    fn all_gather(
        &self,
        answer: &Answer,
        entry: &mut Entry,
        index: usize,
    ) -> Result<Result<(), String>, Lost> {
        let mine = &entry.request.tensors[index];
        let row: usize = mine.shape[1..].iter().map(|d| *d as usize).product();
        let row = row * number::size(mine.dtype);
        let rows: Vec<u64> = answer.rows.iter().map(|member| member[index]).collect();
        let parts: Vec<usize> = rows.iter().map(|count| *count as usize * row).collect();
        let mut shape = mine.shape.clone();
        shape[0] = rows.iter().sum();
        self.with(answer.request.set, |members| {
            let start: usize = parts[..members.place].iter().sum();
            match entry.job.begin(index, &shape, start) {
                Ok(work) => members.all_gather(work, &parts).map(Ok),
                // The others wait for this rank's part, which it cannot even hold.
                Err(problem) => Err(Lost::Meeting(problem)),
            }
        })
    }

    fn reduce_scatter(
        &self,
        answer: &Answer,
        entry: &mut Entry,
        index: usize,
    ) -> Result<Result<(), String>, Lost> {
        let request = &answer.request;
        let meta = &request.tensors[index];
        let row: usize = meta.shape[1..].iter().map(|d| *d as usize).product();
        let row = row * number::size(meta.dtype);
        let mut work = entry.job.input(index).to_vec();
        number::scale(meta.dtype, &mut work, request.factors.0);
        let mut shape = meta.shape.clone();
        let range = self.with(request.set, |members| {
            let size = members.ranks.len();
            // The first members get the rows that are left over.
            let (each, over) = (meta.shape[0] as usize / size, meta.shape[0] as usize % size);
            let rows: Vec<usize> = (0..size).map(|m| each + usize::from(m < over)).collect();
            let parts: Vec<usize> = rows.iter().map(|count| count * row).collect();
            members.reduce_scatter(&mut work, &parts, meta.dtype, request.op)?;
            let start: usize = parts[..members.place].iter().sum();
            shape[0] = rows[members.place] as u64;
            Ok((start..start + parts[members.place], size))
        })?;
        let part = &mut work[range.0];
        number::finish(meta.dtype, request.op, part, request.factors.1, range.1);
        Ok(put(entry, index, &shape, part))
    }

    fn all_to_all(
        &self,
        answer: &Answer,
        entry: &mut Entry,
        outcome: &mut Outcome,
    ) -> Result<Result<(), String>, Lost> {
        let mine = &entry.request.tensors[0];
        let row: usize = mine.shape[1..].iter().map(|d| *d as usize).product();
        let row = row * number::size(mine.dtype);
        let bytes =
            |rows: &[u64]| -> Vec<usize> { rows.iter().map(|n| *n as usize * row).collect() };
        let sent = bytes(&entry.request.splits);
        let mut shape = mine.shape.clone();
        let work = self.with(answer.request.set, |members| {
            outcome.received = answer
                .rows
                .iter()
                .map(|member| member[members.place])
                .collect();
            shape[0] = outcome.received.iter().sum();
            let got = bytes(&outcome.received);
            let mut work = vec![0; got.iter().sum()];
            members.all_to_all(entry.job.input(0), &sent, &mut work, &got)?;
            Ok(work)
        })?;
        Ok(put(entry, 0, &shape, &work))
    }
}

/// Output `index` with a copy of the input in it. None, and why in `made`, where it cannot be made.
fn begun<'a>(
    entry: &'a mut Entry,
    index: usize,
    shape: &[u64],
    made: &mut Result<(), String>,
) -> Option<&'a mut [u8]> {
    match entry.job.begin(index, shape, 0) {
        Ok(work) => Some(work),
        Err(problem) => {
            *made = Err(problem);
            None
        }
    }
}

fn put(entry: &mut Entry, index: usize, shape: &[u64], data: &[u8]) -> Result<(), String> {
    entry.job.output(index, shape)?.copy_from_slice(data);
    Ok(())
}
