// Replaces all of a table's content: builds it aside, which may fail, then swaps, which cannot.
#include <memory>
#include <utility>

#include "cpp/core/cpu/table_impl.h"

namespace sok {

void CpuTable::Impl::SwapContent(Impl& other) noexcept {
  for (int s = 0; s < kNumShards; ++s) shards[s].Swap(other.shards[s]);
  pool.swap(other.pool);  // with the shards whose arrays it holds
  arena.swap(other.arena);
  free_rows.swap(other.free_rows);
  std::swap(next_row, other.next_row);
  std::swap(present, other.present);
  other.size = size.exchange(other.size);
  records.swap(other.records);
  std::swap(step_number, other.step_number);
  ++version;
  ++other.version;
}

std::unique_ptr<Table> CpuTable::MakeAside(CallContext context) const {
  auto aside = std::make_unique<CpuTable>(options(), this);
  std::vector<SlotVariableSpec> of_rule;
  {
    const SharedLock lock(impl_->mutex);
    if (impl_->catch_up != nullptr) of_rule = impl_->slots;
  }
  aside->ConfigureSlots(context, of_rule);
  aside->impl_->is_aside = true;
  aside->impl_->initial_row_scale = InitialRowScale(context);  // unless the content has its own
  return aside;
}

void CpuTable::TakeContent(CallContext context, Table& other) {
  auto& aside = static_cast<CpuTable&>(other);
  const ExclusiveLock lock(impl_->mutex);
  const bool stays = impl_->catch_up != nullptr &&
                     !IsOfAnotherRule(aside.slots(), aside.step_number().last(), impl_->slots);
  // The optimizer may have attached meanwhile: it expects its slots at their places.
  if (stays) aside.ConfigureSlots(context, impl_->slots);
  impl_->TouchAll(context.threads());
  surplus_ += aside.TakeSurplus();
  impl_->SwapContent(*aside.impl_);
  impl_->room = nullptr;
  impl_->slots.swap(aside.impl_->slots);
  impl_->imported_slots.swap(aside.impl_->imported_slots);
  impl_->slot_initial.swap(aside.impl_->slot_initial);
  impl_->ForgetSteps();  // no row owes anything any more
  // The next step attaches an optimizer, and may find that the content is of another rule.
  if (!stays) impl_->catch_up = nullptr;
  impl_->initial_row_scale = aside.impl_->initial_row_scale;
}

}  // namespace sok
